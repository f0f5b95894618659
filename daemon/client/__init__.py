"""What people type to talk to a running daemon: `ask`, `chat` and `status`. Knows HTTP and terminals, nothing else."""

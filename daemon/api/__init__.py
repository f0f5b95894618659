"""HTTP over the Unix socket."""

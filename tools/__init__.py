"""What an administrator runs beside the daemon."""

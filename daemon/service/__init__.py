"""What makes a process a service: settings, limits, notification, logging, metrics."""

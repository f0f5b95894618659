"""HTTP over the Unix socket: routes, schemas, SSE, errors. Knows the engine by its protocol alone."""

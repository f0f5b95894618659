"""One network: config, tensor names, the layer graph, its state."""

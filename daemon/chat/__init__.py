"""Text to tokens and back: tokenizer, XTML, reply reader. Knows nothing of the engine."""

"""Text to tokens and back: tokenizer, chat templates, detokenising, stop strings."""

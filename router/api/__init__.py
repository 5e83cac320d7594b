"""Bodies and answers of the OpenAI API."""

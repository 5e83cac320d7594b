"""The front door: OpenAI API, choice, dispatch, resume."""

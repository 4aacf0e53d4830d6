"""A server with OpenAI's completions, chat completions, files and batches, over one block."""

"""The UI message streams of the AI SDK (``useChat``)."""

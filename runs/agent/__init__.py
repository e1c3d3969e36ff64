"""The agent: the loop that carries runs, the port to language models, and the models themselves."""

"""AG-UI 1.0, and the routes with which CopilotKit needs no runtime of its own."""

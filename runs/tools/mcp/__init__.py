"""The tool type ``mcp``: each tool is a tool of an MCP server (streamable HTTP) that staff add to the catalogue."""

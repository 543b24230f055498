"""Generated text to messages: content, reasoning and tool calls. One file per format."""

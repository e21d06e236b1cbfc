"""The log of messages: in memory and on disk, for replacements."""

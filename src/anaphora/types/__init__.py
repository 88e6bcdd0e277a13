"""The contract between engine, model and server: plain values that can be sent as messages. Standard library only."""

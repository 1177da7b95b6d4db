"""The only room that knows devices by name: which one to use, its memory, what it cannot do."""

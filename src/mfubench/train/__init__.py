"""The training engine: `launch` starts the ranks, `loop` is what each of them does."""

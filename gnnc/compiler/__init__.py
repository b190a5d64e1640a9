"""The compiler driver: a captured graph becomes a program, and calls find their program."""

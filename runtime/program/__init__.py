"""Executable programs: the emitter, the memory plan and the object that runs the program."""

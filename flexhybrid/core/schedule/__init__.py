"""The order of the work: positions of the zig-zag, what each reads and writes, steps, dependencies."""

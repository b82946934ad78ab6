"""The searches of the papers: Algorithm 1 of CAPTURE, FlexGen's linear program."""

"""Other systems beside ours, each side in a process of its own; none of their code is kept here."""

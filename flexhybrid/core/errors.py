"""The one error that users see: what was wrong, with which value, what to do."""


class InputError(ValueError):
    """A request, file or setting that cannot be served. The command line prints its text and exits with status 2."""

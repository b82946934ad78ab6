"""The child's half of a peer's run: one JSON request on standard input, one JSON answer on standard output.

Standard library only, so that a peer meets no library of this project.
"""

import contextlib
import json
import sys
from collections.abc import Callable, Mapping

Side = Callable[[dict], dict]  #: from a request to an answer


def serve(sides: Mapping[str, Side]) -> None:
    """Answer the request on standard input with the side that its field "side" names.

    The answer is {"missing": …} for an import that failed and {"error": …} for any other failure: a peer may fail in
    any way. What a side prints goes to standard error.
    """
    request = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        try:
            answer = sides[request["side"]](request)
        except ImportError as error:
            answer = {"missing": str(error)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}
    json.dump(answer, sys.stdout, default=float)

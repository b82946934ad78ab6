"""A process that searches during a running batch: it reads the arguments from stdin and writes the result to stdout."""

import pickle
import sys

from flexhybrid.core.errors import InputError
from policy_search.queue_search import best_for_queue

if __name__ == "__main__":
    problem, waiting, settings, given = pickle.load(sys.stdin.buffer)
    try:
        choice = best_for_queue(problem, waiting, settings, given)
    except InputError:
        sys.exit(1)
    pickle.dump((choice.policy, choice.run), sys.stdout.buffer)

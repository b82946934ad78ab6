"""The verbs: one function each, called with the executor and a task."""

from flexhybrid.runtime.verbs import attending, computing, moving, speculating

#: verb -> function(executor, task)
VERBS = {**computing.VERBS, **attending.VERBS, **moving.VERBS, **speculating.VERBS}

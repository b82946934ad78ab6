"""Settings of the process that runs hold: the last user restores what was there before the first."""

import sys
import threading

import pytest

from flexhybrid.core.task import Task, Work
from flexhybrid.runtime.clock import Clock, HostLane
from flexhybrid.runtime.process_settings import SHORT_SWITCH_INTERVAL, HeldSetting


def test_the_last_user_restores_the_setting():
    values = ["before"]
    setting = HeldSetting(lambda: values[-1], values.append, "held")
    first, second = setting.held(), setting.held()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert values == ["before", "held"]
    second.__exit__(None, None, None)
    assert values == ["before", "held", "before"]
    with pytest.raises(KeyError), setting.held():
        raise KeyError
    assert values[-1] == "before"


def test_two_clocks_at_once_leave_the_switch_interval_as_it_was():
    """The one that starts first ends first, while the other one still runs."""
    before, seen = sys.getswitchinterval(), []
    started, may_end = threading.Event(), threading.Event()
    task = Task(0, 0, 0, "embed", "compute", Work(), (), ())

    def wait(task: Task) -> None:
        started.set()
        assert may_end.wait(60)

    def look(task: Task) -> None:
        seen.append(sys.getswitchinterval())

    with SHORT_SWITCH_INTERVAL.held():
        short = sys.getswitchinterval()
    first = threading.Thread(target=Clock([HostLane("compute", wait)]).run, args=([task],))
    first.start()
    assert started.wait(60)
    Clock([HostLane("compute", look)]).run([task])
    seen.append(sys.getswitchinterval())
    may_end.set()
    first.join(60)
    assert seen == [short, short] and short < before == sys.getswitchinterval()

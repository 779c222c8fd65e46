from sglang_rollout.transfer.send_times import SendTimes


def test_what_is_so_again_is_told_by_the_last_time() -> None:
    clock = iter((5.0, 5.001, 5.002, 5.01))
    times = SendTimes(lambda: next(clock))
    times.mark("announced")
    times.mark("announced")
    times.mark("sealed")
    times.packing += 0.004
    assert times.words() == "announced at 2.0, sealed at 10.0, packed for 4.0 ms"

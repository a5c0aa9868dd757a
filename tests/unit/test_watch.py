"""A process that has to end says why, also if a collective fails a moment before that is known."""

import socket

import pytest

from lightning_sym.cli.watch import Watch


def test_a_collective_that_fails_first_ends_with_the_sentence(capsys):
    here, there = socket.socketpair()
    with Watch() as watch:
        watch.join(1, {here: (0, 1234, "elsewhere")})

        def work():
            there.close()  # as the kernel does when the other process is killed
            raise RuntimeError("connection closed by peer")

        with pytest.raises(SystemExit) as ended:
            watch.call(work)
    assert ended.value.code == 1
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1
    assert said[0].startswith("lightning-sym: rank 0 (process 1234 on elsewhere) ended without a word")

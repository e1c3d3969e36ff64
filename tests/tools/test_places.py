"""Tests of the users' shares: a user's excess waits in line, also after cancels and beside stuck threads."""

import asyncio
import threading

from config.limits.share import Share, Threads


class Line:
    """Pieces of work that hold places until they are released, and the order in which they began."""

    def __init__(self, per_user):
        self.places = Share(per_user)
        self.begun = []
        self.ends = {}

    def add(self, name, user_id=1, amount=1):
        self.ends[name] = asyncio.Event()

        async def work():
            async with self.places.hold(user_id, amount):
                self.begun.append(name)
                await self.ends[name].wait()

        return asyncio.create_task(work())

    async def end(self, name):
        self.ends[name].set()
        await settle()


async def settle():
    for _ in range(10):
        await asyncio.sleep(0)


def test_a_users_excess_waits_in_order_and_others_do_not():
    async def scenario():
        line = Line(2)
        for number in range(5):
            line.add(number)
        line.add("other", user_id=2)
        await settle()
        assert line.begun == [0, 1, "other"]
        assert (line.places.taken, line.places.waiting) == (3, 3)
        await line.end(1)
        await line.end(0)
        assert line.begun == [0, 1, "other", 2, 3]
        for name in (2, 3, 4, "other"):
            await line.end(name)
        assert (line.places.taken, line.places.waiting) == (0, 0)

    asyncio.run(scenario())


def test_late_work_does_not_overtake_the_line():
    async def scenario():
        line = Line(10)
        line.add("large", amount=7)
        line.add("larger", amount=1000)
        line.add("small", amount=1)
        await settle()
        assert line.begun == ["large"]
        await line.end("large")
        assert (line.begun, line.places.taken) == (["large", "larger"], 10)
        await line.end("larger")
        assert line.begun[-1] == "small"
        await line.end("small")

    asyncio.run(scenario())


def test_a_cancel_ends_the_wait_at_once_and_leaves_the_line():
    async def scenario():
        line = Line(1)
        line.add("first")
        cancelled = line.add("cancelled")
        line.add("last")
        await settle()
        cancelled.cancel()
        await asyncio.wait([cancelled], timeout=20)
        assert cancelled.cancelled()
        assert line.places.waiting == 1
        await line.end("first")
        assert line.begun == ["first", "last"]

    asyncio.run(scenario())


def test_a_place_given_in_the_moment_of_a_cancel_is_not_lost():
    async def scenario():
        places = Share(1)
        await places.take(1)
        waiting = asyncio.create_task(places.take(1))
        await settle()
        places.give_back(1)
        waiting.cancel()
        await asyncio.wait([waiting], timeout=20)
        assert waiting.cancelled()
        assert (places.taken, places.waiting) == (0, 0)

    asyncio.run(scenario())


def test_a_place_that_another_event_loop_gives_back_wakes_an_idle_one():
    places, waits = Share(1), threading.Event()

    async def wait():
        asyncio.get_running_loop().call_soon(waits.set)
        await places.take(1)

    asyncio.run(places.take(1))
    thread = threading.Thread(target=asyncio.run, args=[wait()], daemon=True)
    thread.start()
    assert waits.wait(20)
    places.give_back(1)
    thread.join(20)
    assert not thread.is_alive()


def test_stuck_functions_of_one_user_leave_threads_to_others():
    async def scenario():
        threads, release, running = Threads(3, 2, "test"), threading.Event(), threading.Semaphore(0)

        def stuck():
            running.release()
            release.wait(30)

        greedy = [asyncio.create_task(threads.run(1, stuck)) for _ in range(50)]
        for _ in range(2):
            assert await asyncio.to_thread(running.acquire, timeout=20)
        assert await threads.run(2, lambda: "done") == "done"
        # A thread that a cancel left behind still counts for its user.
        for task in greedy:
            task.cancel()
        await asyncio.wait(greedy)
        further = asyncio.create_task(threads.run(1, lambda: "later"))
        assert await threads.run(2, lambda: "done") == "done"
        assert not further.done()
        release.set()
        assert await further == "later"
        threads.shutdown()

    asyncio.run(scenario())


def test_a_long_input_is_computed_on_a_thread():
    async def scenario():
        threads = Threads(1, 1, "test")
        names = [await threads.compute(1, size, lambda: threading.current_thread().name) for size in (10, 100_000)]
        threads.shutdown()
        return names

    here, there = asyncio.run(scenario())
    assert here == threading.current_thread().name
    assert there.startswith("test")

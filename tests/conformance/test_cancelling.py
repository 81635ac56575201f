"""Commands that are given up as they start: whatever the moment, the sandbox goes on and nothing of them is left."""

from __future__ import annotations

import asyncio

import shoal


def test_starts_that_are_given_up_in_a_row(shoal_home: object) -> None:
    """Each is killed while the next is forked, which for a moment holds copies of all that init has open."""

    async def give_up() -> None:
        async with await shoal.AsyncSandbox.create() as box:
            for number in range(240):
                task = asyncio.create_task(box.commands.run(["sleep", "60"], background=True))
                await asyncio.sleep(number % 24 / 5000)
                if task.cancel():
                    await asyncio.gather(task, return_exceptions=True)
                else:
                    await (await task).kill()
            for _ in range(200):
                left = (await box.commands.run("pgrep -c sleep")).stdout
                if left == "0\n":
                    break
                await asyncio.sleep(0.05)
            assert left == "0\n"

    asyncio.run(give_up())

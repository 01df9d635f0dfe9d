"""A proxy that delays what passes in each direction, where the kernel has no netem: delaying.py LISTEN TARGET MILLISECONDS [PIECES].

It delays, and it takes processor time: compare what was measured through it only with what else was. At most PIECES of 64 KiB
wait in it (256); fewer keep it from becoming a buffer before a slow link."""

import asyncio
import sys


async def pass_on(reader, writer, delay_s, pieces):
    """Writes what is read, each piece after its delay. What waits is bounded, so a slow reader holds the sender back."""
    loop = asyncio.get_running_loop()
    waiting = asyncio.Queue(maxsize=pieces)

    async def write():
        while piece := await waiting.get():
            at, data = piece
            if (rest := at - loop.time()) > 0:
                await asyncio.sleep(rest)
            writer.write(data)
            await writer.drain()
        writer.write_eof()

    writing = asyncio.create_task(write())
    try:
        while data := await reader.read(1 << 16):
            await waiting.put((loop.time() + delay_s, data))
        await waiting.put(None)
        await writing
    except OSError:
        writer.close()
    finally:
        writing.cancel()


async def serve(listen, target, delay_s, pieces):
    async def connect(reader, writer):
        there_reader, there_writer = await asyncio.open_connection(*target)
        await asyncio.gather(pass_on(reader, there_writer, delay_s, pieces), pass_on(there_reader, writer, delay_s, pieces), return_exceptions=True)
        for end in (writer, there_writer):
            end.close()

    async with await asyncio.start_server(connect, *listen) as server:
        await server.serve_forever()


def address(text):
    host, port = text.rsplit(":", 1)
    return host, int(port)


if __name__ == "__main__":
    listen, target, delay_ms, *pieces = sys.argv[1:]
    asyncio.run(serve(address(listen), address(target), float(delay_ms) / 1000, int(pieces[0]) if pieces else 256))

"""Executes the commands of a test with redis-py and its cache: driver.py PORT. One line of JSON for each command,
[name, argument, ...], and one line for its outcome, {"value": ...} or {"error": "..."}."""

import json
import sys

import redis
import redis.cache


def told(reply):
    """As the other clients return it."""
    if reply is True:
        return "OK"
    return f"error: {reply}" if isinstance(reply, Exception) else reply


class Client:
    def __init__(self, port):
        self.client = redis.Redis(port=port, protocol=3, decode_responses=True, cache_config=redis.cache.CacheConfig(), socket_timeout=20)
        self.watching = None
        self.client.ping()

    def get(self, key):
        return self.client.get(key)

    def mget(self, *keys):
        return self.client.mget(keys)

    def set(self, key, value):
        return told(self.client.set(key, value))

    def delete(self, key):
        return self.client.delete(key)

    def pipeline(self, *commands):
        with self.client.pipeline(transaction=False) as pipeline:
            for command in commands:
                pipeline.execute_command(*command)
            return [told(reply) for reply in pipeline.execute(raise_on_error=False)]

    def watch(self, *keys):
        self.watching = self.client.pipeline()
        return self.watching.watch(*keys)

    def exec(self, *commands):
        pipeline, self.watching = self.watching or self.client.pipeline(), None
        with pipeline:
            pipeline.multi()
            for command in commands:
                pipeline.execute_command(*command)
            try:
                return [told(reply) for reply in pipeline.execute(raise_on_error=False)]
            except redis.WatchError:
                return None


def main():
    client = Client(int(sys.argv[1]))
    print(json.dumps({"value": "ready"}), flush=True)
    for line in sys.stdin:
        name, *words = json.loads(line)
        try:
            outcome = {"value": getattr(client, "delete" if name == "del" else name)(*words)}
        except Exception as error:
            outcome = {"error": repr(error)}
        print(json.dumps(outcome), flush=True)


main()

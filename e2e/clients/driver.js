// Executes the commands of a test with a caching client: node driver.js CLIENT PORT. One line of JSON for each command,
// [name, argument, ...], and one line for its outcome, {"value": ...} or {"error": "..."}.
"use strict";

const readline = require("node:readline");

/** node-redis, with its cache, on one connection. */
async function nodeRedis(library, port) {
  const { createClient, BasicClientSideCache } = require(library);
  const client = createClient({ RESP: 3, url: `redis://127.0.0.1:${port}`, clientSideCache: new BasicClientSideCache({ maxEntries: 10000 }) });
  client.on("error", () => {});
  await client.connect();
  return {
    get: (key) => client.get(key),
    mget: (...keys) => client.mGet(keys),
    set: (key, value) => client.set(key, value),
    del: (key) => client.del(key),
    // Commands of one turn of the loop are sent together.
    pipeline: (...commands) => Promise.all(commands.map((words) => client.sendCommand(words).catch((error) => `error: ${error.message}`))),
    watch: (...keys) => client.watch(keys),
    exec: async (...commands) => {
      const multi = client.multi();
      for (const words of commands) multi.addCommand(words);
      try {
        return await multi.exec();
      } catch (error) {
        if (error.constructor.name === "WatchError") return null;
        throw error;
      }
    },
  };
}

/** node-redis, with one cache over a pool of connections. */
async function nodeRedisPool(library, port) {
  const { createClientPool, BasicPooledClientSideCache } = require(library);
  const pool = createClientPool(
    { RESP: 3, url: `redis://127.0.0.1:${port}` },
    { minimum: 3, maximum: 3, clientSideCache: new BasicPooledClientSideCache({ maxEntries: 10000 }) },
  );
  pool.on("error", () => {});
  await pool.connect();
  return {
    get: (key) => pool.get(key),
    mget: (...keys) => pool.mGet(keys),
    set: (key, value) => pool.set(key, value),
    del: (key) => pool.del(key),
    pipeline: (...commands) => Promise.all(commands.map((words) => pool.sendCommand(words).catch((error) => `error: ${error.message}`))),
    exec: async (...commands) => {
      const multi = pool.multi();
      for (const words of commands) multi.addCommand(words);
      return multi.exec();
    },
  };
}

/** ioredis has no cache. This one is what its users write: a connection in RESP2 that is told, and one that reads. */
async function ioredis(library, port) {
  const { Redis } = require(library);
  const options = { port, host: "127.0.0.1", retryStrategy: () => 50, maxRetriesPerRequest: null };
  const told = new Redis({ ...options, protocol: 2, lazyConnect: true, autoResubscribe: true });
  const client = new Redis({ ...options, lazyConnect: true });
  const cache = new Map();
  // Changes with each message, so that a reply to an earlier read is not kept.
  let epoch = 0;
  let tracking = false;
  const forget = () => {
    tracking = false;
    epoch++;
    cache.clear();
  };
  for (const connection of [told, client]) {
    connection.on("error", () => {});
    connection.on("close", forget);
  }
  // The keys of a message are an array, which only messageBuffer hands over.
  told.on("messageBuffer", (channel, keys) => {
    epoch++;
    if (keys === null) cache.clear();
    else for (const key of keys) cache.delete(key.toString());
  });
  const track = async () => {
    const id = await told.client("ID");
    await told.subscribe("__redis__:invalidate");
    await client.client("TRACKING", "ON", "REDIRECT", id);
    cache.clear();
    tracking = true;
  };
  told.on("ready", () => (tracking = false));
  await told.connect();
  await client.connect();
  await track();
  // A connection that has subscribed in RESP2 takes no CLIENT ID: it is made anew.
  const again = async () => {
    await told.unsubscribe("__redis__:invalidate");
    await track();
  };
  return {
    get: async (key) => {
      if (!tracking) await again();
      if (cache.has(key)) return cache.get(key);
      const before = epoch;
      const value = await client.get(key);
      if (before === epoch && tracking) cache.set(key, value);
      return value;
    },
    mget: (...keys) => client.mget(keys),
    set: (key, value) => client.set(key, value),
    del: (key) => client.del(key),
    pipeline: async (...commands) => (await client.pipeline(commands).exec()).map(([error, value]) => (error ? `error: ${error.message}` : value)),
    watch: (...keys) => client.watch(keys),
    exec: async (...commands) => {
      const replies = await client.multi(commands).exec();
      return replies && replies.map(([error, value]) => (error ? `error: ${error.message}` : value));
    },
  };
}

const CLIENTS = {
  "node-redis": (port) => nodeRedis("redis", port),
  "node-redis5": (port) => nodeRedis("redis5", port),
  "node-redis-pool": (port) => nodeRedisPool("redis", port),
  "node-redis5-pool": (port) => nodeRedisPool("redis5", port),
  ioredis: (port) => ioredis("ioredis", port),
  ioredis5: (port) => ioredis("ioredis5", port),
};

async function main() {
  const [name, port] = process.argv.slice(2);
  const client = await CLIENTS[name](Number(port));
  const say = (outcome) => console.log(JSON.stringify(outcome));
  say({ value: "ready" });
  for await (const line of readline.createInterface({ input: process.stdin })) {
    const [command, ...words] = JSON.parse(line);
    try {
      say({ value: (await client[command](...words)) ?? null });
    } catch (error) {
      say({ error: String(error) });
    }
  }
  process.exit(0);
}

main();

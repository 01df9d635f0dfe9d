import java.util.ArrayList;
import java.util.List;
import redis.clients.jedis.AbstractTransaction;
import redis.clients.jedis.DefaultJedisClientConfig;
import redis.clients.jedis.HostAndPort;
import redis.clients.jedis.RedisProtocol;
import redis.clients.jedis.Response;
import redis.clients.jedis.UnifiedJedis;
import redis.clients.jedis.commands.StringPipelineCommands;
import redis.clients.jedis.commands.KeyPipelineCommands;
import redis.clients.jedis.csc.CacheConfig;

/** Jedis, with its cache. */
public class JedisDriver extends Driver {
  private final UnifiedJedis client;
  private AbstractTransaction transaction;

  JedisDriver(int port) {
    client = Open.client(
        new HostAndPort("127.0.0.1", port),
        DefaultJedisClientConfig.builder().protocol(RedisProtocol.RESP3).build(),
        CacheConfig.builder().maxSize(10_000).build());
  }

  public static void main(String[] arguments) throws Exception {
    new JedisDriver(Integer.parseInt(arguments[0])).run();
  }

  @Override
  Object get(String key) {
    return client.get(key);
  }

  @Override
  Object mget(List<String> keys) {
    return client.mget(keys.toArray(new String[0]));
  }

  @Override
  Object set(String key, String value) {
    return client.set(key, value);
  }

  @Override
  Object del(String key) {
    return client.del(key);
  }

  private static Response<?> send(StringPipelineCommands strings, KeyPipelineCommands keys, List<String> command) {
    switch (command.get(0)) {
      case "get": return strings.get(command.get(1));
      case "set": return strings.set(command.get(1), command.get(2));
      case "incr": return strings.incr(command.get(1));
      case "del": return keys.del(command.get(1));
      default: throw new IllegalArgumentException("unknown: " + command);
    }
  }

  private static List<Object> values(List<Response<?>> responses) {
    List<Object> values = new ArrayList<>();
    for (Response<?> response : responses) {
      try {
        values.add(response.get());
      } catch (RuntimeException error) {
        values.add("error: " + error.getMessage());
      }
    }
    return values;
  }

  @Override
  Object pipeline(List<List<String>> commands) {
    try (var pipeline = client.pipelined()) {
      List<Response<?>> responses = new ArrayList<>();
      for (List<String> command : commands) {
        responses.add(send(pipeline, pipeline, command));
      }
      pipeline.sync();
      return values(responses);
    }
  }

  @Override
  Object watch(List<String> keys) {
    transaction = client.transaction(false);
    return transaction.watch(keys.toArray(new String[0]));
  }

  @Override
  Object exec(List<List<String>> commands) {
    try (AbstractTransaction current = transaction != null ? transaction : client.transaction(false)) {
      transaction = null;
      current.multi();
      List<Response<?>> responses = new ArrayList<>();
      for (List<String> command : commands) {
        responses.add(send(current, current, command));
      }
      return current.exec() == null ? null : values(responses);
    }
  }
}

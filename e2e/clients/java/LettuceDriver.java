import io.lettuce.core.RedisChannelHandler;
import io.lettuce.core.RedisClient;
import io.lettuce.core.RedisConnectionStateListener;
import io.lettuce.core.RedisFuture;
import io.lettuce.core.TrackingArgs;
import io.lettuce.core.TransactionResult;
import io.lettuce.core.api.StatefulRedisConnection;
import io.lettuce.core.api.async.RedisAsyncCommands;
import io.lettuce.core.api.push.PushMessage;
import io.lettuce.core.support.caching.CacheAccessor;
import io.lettuce.core.support.caching.CacheFrontend;
import io.lettuce.core.support.caching.ClientSideCaching;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.TimeUnit;

/**
 * Lettuce, with its cache and what that leaves to its user: to close the gap between a reply and its place in the map ({@link Cached}),
 * to hear of FLUSHALL, and to begin anew after a lost connection.
 */
public class LettuceDriver extends Driver {
  private final StatefulRedisConnection<String, String> connection;
  private final CacheFrontend<String, String> cache;
  private final Cached cached = new Cached();
  private volatile boolean lost;

  /**
   * What is cached. A message may arrive after the reply to a read and before lettuce enters the value: a value is kept only if
   * no message has come since the map was asked for it.
   */
  private static class Cached implements CacheAccessor<String, String> {
    private final Map<String, String> values = new HashMap<>();
    private long messages;
    private long asked;

    @Override
    public synchronized String get(String key) {
      asked = messages;
      return values.get(key);
    }

    @Override
    public synchronized void put(String key, String value) {
      if (asked == messages) {
        values.put(key, value);
      }
    }

    @Override
    public synchronized void evict(String key) {
      messages++;
      values.remove(key);
    }

    synchronized void clear() {
      messages++;
      values.clear();
    }
  }

  LettuceDriver(int port) {
    RedisClient client = RedisClient.create("redis://127.0.0.1:" + port);
    connection = client.connect();
    connection.addListener((PushMessage message) -> {
      // The message of FLUSHALL names no keys. Lettuce passes on only keys.
      if (message.getType().equals("invalidate") && message.getContent().get(1) == null) {
        cached.clear();
      }
    });
    connection.addListener(new RedisConnectionStateListener() {
      @Override
      public void onRedisDisconnected(RedisChannelHandler<?, ?> handler) {
        lost = true;
        cached.clear();
      }
    });
    cache = ClientSideCaching.enable(cached, connection, TrackingArgs.Builder.enabled());
  }

  public static void main(String[] arguments) throws Exception {
    new LettuceDriver(Integer.parseInt(arguments[0])).run();
  }

  @Override
  Object get(String key) {
    if (lost) {
      // Lettuce does not ask for messages again by itself.
      connection.sync().clientTracking(TrackingArgs.Builder.enabled());
      cached.clear();
      lost = false;
    }
    return cache.get(key);
  }

  @Override
  Object mget(List<String> keys) {
    List<Object> values = new ArrayList<>();
    connection.sync().mget(keys.toArray(new String[0])).forEach(pair -> values.add(pair.getValueOrElse(null)));
    return values;
  }

  @Override
  Object set(String key, String value) {
    return connection.sync().set(key, value);
  }

  @Override
  Object del(String key) {
    return connection.sync().del(key);
  }

  private RedisFuture<?> send(List<String> command) {
    RedisAsyncCommands<String, String> commands = connection.async();
    switch (command.get(0)) {
      case "get": return commands.get(command.get(1));
      case "set": return commands.set(command.get(1), command.get(2));
      case "incr": return commands.incr(command.get(1));
      case "del": return commands.del(command.get(1));
      default: throw new IllegalArgumentException("unknown: " + command);
    }
  }

  @Override
  Object pipeline(List<List<String>> commands) throws Exception {
    connection.setAutoFlushCommands(false);
    List<RedisFuture<?>> futures = new ArrayList<>();
    for (List<String> command : commands) {
      futures.add(send(command));
    }
    connection.flushCommands();
    connection.setAutoFlushCommands(true);
    List<Object> values = new ArrayList<>();
    for (RedisFuture<?> future : futures) {
      try {
        values.add(future.get(20, TimeUnit.SECONDS));
      } catch (java.util.concurrent.ExecutionException error) {
        values.add("error: " + error.getCause().getMessage());
      }
    }
    return values;
  }

  @Override
  Object watch(List<String> keys) {
    return connection.sync().watch(keys.toArray(new String[0]));
  }

  @Override
  Object exec(List<List<String>> commands) throws Exception {
    connection.sync().multi();
    for (List<String> command : commands) {
      send(command);
    }
    TransactionResult result = connection.sync().exec();
    return result.wasDiscarded() ? null : result.stream().toArray();
  }
}

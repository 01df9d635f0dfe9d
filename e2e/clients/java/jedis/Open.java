import redis.clients.jedis.HostAndPort;
import redis.clients.jedis.JedisClientConfig;
import redis.clients.jedis.RedisClient;
import redis.clients.jedis.UnifiedJedis;
import redis.clients.jedis.csc.CacheConfig;

/** A caching client of Jedis 7 and later. */
class Open {
  static UnifiedJedis client(HostAndPort address, JedisClientConfig settings, CacheConfig cache) {
    return RedisClient.builder().hostAndPort(address).clientConfig(settings).cacheConfig(cache).build();
  }
}

import redis.clients.jedis.HostAndPort;
import redis.clients.jedis.JedisClientConfig;
import redis.clients.jedis.JedisPooled;
import redis.clients.jedis.UnifiedJedis;
import redis.clients.jedis.csc.CacheConfig;

/** A caching client of Jedis 5 and 6. */
class Open {
  static UnifiedJedis client(HostAndPort address, JedisClientConfig settings, CacheConfig cache) {
    return new JedisPooled(address, settings, cache);
  }
}

/* client DIR ADDRESS TLS-ADDRESS: what a client does with a node that wants the password "secret". */
#include "check.h"

static millrace_client_options *with_password(void) {
  millrace_client_options *options = millrace_client_options_new();
  OK(millrace_client_options_set_password(options, "secret", &error));
  return options;
}

static int holds(const millrace_client *client, const char *key, const char *text) {
  millrace_value value;
  OK(millrace_client_get(client, str(key), &value, &error));
  return value_is(value, text);
}

static void set(const millrace_client *client, const char *key, const char *value) {
  OK(millrace_client_set(client, str(key), str(value), &error));
}

static void keys(const millrace_client *client) {
  bool existed = false;
  CHECK(holds(client, "hello", NULL));
  set(client, "hello", "world");
  CHECK(holds(client, "hello", "world"));
  OK(millrace_client_delete(client, str("hello"), &existed, &error));
  CHECK(existed && holds(client, "hello", NULL));
  OK(millrace_client_delete(client, str("hello"), &existed, &error));
  CHECK(!existed);
  OK(millrace_client_delete(client, str("hello"), NULL, &error));

  /* Empty is not missing, and bytes are any. */
  millrace_value value;
  OK(millrace_client_set(client, millrace_bytes("\0\xff", 2), millrace_unbounded(), &error));
  OK(millrace_client_get(client, millrace_bytes("\0\xff", 2), &value, &error));
  CHECK(value.data != NULL && value.size == 0);
  millrace_value_free(&value);
  OK(millrace_client_delete(client, millrace_bytes("\0\xff", 2), NULL, &error));

  size_t size = 3 << 20;
  char *large = malloc(size);
  memset(large, 'x', size);
  OK(millrace_client_set(client, str("large"), millrace_bytes(large, size), &error));
  OK(millrace_client_get(client, str("large"), &value, &error));
  CHECK(value.size == size && memcmp(value.data, large, size) == 0);
  millrace_value_free(&value);
  OK(millrace_client_delete(client, str("large"), NULL, &error));
  free(large);
}

static void many(const millrace_client *client) {
  millrace_client_batch *batch = millrace_client_batch_new();
  OK(millrace_client_batch_set(batch, str("a"), str("1"), &error));
  OK(millrace_client_batch_set(batch, str("b"), str("2"), &error));
  OK(millrace_client_batch_set(batch, str("c"), str("3"), &error));
  OK(millrace_client_batch_delete(batch, str("c"), &error));
  CHECK(millrace_client_batch_count(batch) == 4 && millrace_client_batch_bytes(batch) == 7);
  OK(millrace_client_write(client, batch, &error));
  CHECK(millrace_client_batch_count(batch) == 0);
  OK(millrace_client_write(client, batch, &error));

  millrace_slice names[3];
  millrace_value values[3];
  names[0] = str("b");
  names[1] = str("c");
  names[2] = str("a");
  OK(millrace_client_multi_get(client, names, 3, values, &error));
  CHECK(is(millrace_bytes(values[0].data, values[0].size), "2") && values[1].data == NULL);
  CHECK(is(millrace_bytes(values[2].data, values[2].size), "1"));
  millrace_values_free(values, 3);
  OK(millrace_client_multi_get(client, NULL, 0, NULL, &error));

  OK(millrace_client_batch_set(batch, str("d"), str("4"), &error));
  millrace_client_batch_clear(batch);
  CHECK(millrace_client_batch_count(batch) == 0);
  OK(millrace_client_batch_set(batch, str("d"), str("4"), &error));
  OK(millrace_client_batch_delete_range(batch, str("a"), str("b"), &error));
  OK(millrace_client_write(client, batch, &error));
  millrace_client_batch_free(batch);
  CHECK(holds(client, "a", NULL) && holds(client, "b", "2") && holds(client, "d", "4"));
}

static void ranges(const millrace_client *client) {
  millrace_slice none = millrace_unbounded();
  millrace_iter *iter = NULL;
  uint64_t count = 7;
  for (char key = 'a'; key <= 'e'; key++) {
    OK(millrace_client_set(client, millrace_bytes(&key, 1), str("v"), &error));
  }
  OK(millrace_client_range(client, none, none, 0, &iter, &error));
  CHECK(keys_are(iter, "abcde"));
  OK(millrace_client_range(client, str("b"), str("d"), 0, &iter, &error));
  CHECK(keys_are(iter, "bc"));
  OK(millrace_client_range(client, str("b"), str("d"), MILLRACE_REVERSE, &iter, &error));
  CHECK(keys_are(iter, "cb"));
  OK(millrace_client_range(client, str("b"), str("d"), MILLRACE_EXCLUDE_START | MILLRACE_INCLUDE_END, &iter, &error));
  CHECK(keys_are(iter, "cd"));
  set(client, "ba", "value");
  OK(millrace_client_prefix(client, str("b"), MILLRACE_REVERSE, &iter, &error));
  millrace_slice key, value;
  CHECK(millrace_iter_next(iter, &key, &value) && is(key, "ba") && is(value, "value"));
  CHECK(keys_are(iter, "b"));
  OK(millrace_client_delete_range(client, str("b"), str("c"), &count, &error));
  CHECK(count == 2);
  OK(millrace_client_delete_range(client, str("c"), str("b"), &count, &error));
  CHECK(count == 0);
  OK(millrace_client_delete_range(client, str(""), str("z"), NULL, &error));
  OK(millrace_client_range(client, none, none, 0, &iter, &error));
  CHECK(keys_are(iter, ""));
}

/* More entries than one page has. */
static void pages(const millrace_client *client) {
  millrace_client_batch *batch = millrace_client_batch_new();
  char text[5000];
  memset(text, 'v', sizeof text);
  for (int i = 0; i < 100; i++) {
    char key[16];
    snprintf(key, sizeof key, "%04d", i);
    OK(millrace_client_batch_set(batch, str(key), millrace_bytes(text, sizeof text), &error));
  }
  OK(millrace_client_write(client, batch, &error));
  millrace_client_batch_free(batch);
  millrace_iter *iter = NULL;
  millrace_slice key, value;
  int count = 0;
  OK(millrace_client_range(client, millrace_unbounded(), millrace_unbounded(), 0, &iter, &error));
  while (millrace_iter_next(iter, &key, &value)) {
    char expected[16];
    snprintf(expected, sizeof expected, "%04d", count++);
    CHECK(is(key, expected) && value.size == sizeof text);
  }
  OK(millrace_iter_status(iter, &error));
  CHECK(count == 100);
  millrace_iter_free(iter);
  OK(millrace_client_delete_range(client, str("0"), str("1"), NULL, &error));
}

static void transactions(const millrace_client *client) {
  millrace_client_transaction *transaction = NULL;
  millrace_value value;
  set(client, "n", "1");
  OK(millrace_client_transaction_begin(client, &transaction, &error));
  OK(millrace_client_transaction_get(transaction, str("n"), &value, &error));
  CHECK(value_is(value, "1"));
  OK(millrace_client_transaction_set(transaction, str("n"), str("2"), &error));
  OK(millrace_client_transaction_delete(transaction, str("x"), &error));
  OK(millrace_client_transaction_get(transaction, str("n"), &value, &error));
  CHECK(value_is(value, "2") && holds(client, "n", "1"));
  OK(millrace_client_transaction_commit(transaction, &error));
  CHECK(holds(client, "n", "2"));

  OK(millrace_client_transaction_begin(client, &transaction, &error));
  OK(millrace_client_transaction_get(transaction, str("n"), &value, &error));
  CHECK(value_is(value, "2"));
  set(client, "n", "3");
  OK(millrace_client_transaction_set(transaction, str("n"), str("4"), &error));
  FAILS(MILLRACE_CONFLICT, millrace_client_transaction_commit(transaction, &error));
  CHECK(holds(client, "n", "3"));

  OK(millrace_client_transaction_begin(client, &transaction, &error));
  OK(millrace_client_transaction_set(transaction, str("n"), str("5"), &error));
  millrace_client_transaction_free(transaction);
  CHECK(holds(client, "n", "3"));
}

static int64_t left(const millrace_client *client, const char *key) {
  int64_t ttl_ms = 7;
  OK(millrace_client_ttl(client, str(key), &ttl_ms, &error));
  return ttl_ms;
}

static void deadlines(const millrace_client *client) {
  const uint64_t minute = 60000;
  bool done = true;
  OK(millrace_client_expire(client, str("ends"), minute, &done, &error));
  CHECK(!done && left(client, "ends") == MILLRACE_NO_KEY);
  OK(millrace_client_set_with_ttl(client, str("ends"), str("1"), minute, &error));
  CHECK(left(client, "ends") > 30000 && left(client, "ends") <= 60000 && holds(client, "ends", "1"));
  OK(millrace_client_persist(client, str("ends"), &done, &error));
  CHECK(done && left(client, "ends") == MILLRACE_FOREVER);
  OK(millrace_client_persist(client, str("ends"), &done, &error));
  CHECK(!done);
  OK(millrace_client_expire(client, str("ends"), (uint64_t)1 << 62, &done, &error));
  CHECK(done && left(client, "ends") > (int64_t)1 << 61);
  set(client, "ends", "2");
  CHECK(left(client, "ends") == MILLRACE_FOREVER);
  OK(millrace_client_expire(client, str("ends"), minute, NULL, &error));
  OK(millrace_client_persist(client, str("ends"), NULL, &error));

  millrace_client_batch *batch = millrace_client_batch_new();
  OK(millrace_client_batch_set_with_ttl(batch, str("ends"), str("3"), minute, &error));
  OK(millrace_client_batch_set(batch, str("stays"), str("3"), &error));
  CHECK(millrace_client_batch_count(batch) == 2);
  OK(millrace_client_write(client, batch, &error));
  CHECK(holds(client, "ends", "3") && left(client, "ends") > 30000 && left(client, "stays") == MILLRACE_FOREVER);
  OK(millrace_client_batch_set_with_ttl(batch, str("stays"), str("4"), 0, &error));
  FAILS(MILLRACE_INVALID_OPTION, millrace_client_write(client, batch, &error));
  millrace_client_batch_free(batch);

  millrace_client_transaction *transaction = NULL;
  millrace_value value;
  OK(millrace_client_transaction_begin(client, &transaction, &error));
  OK(millrace_client_transaction_get(transaction, str("stays"), &value, &error));
  CHECK(value_is(value, "3"));
  OK(millrace_client_transaction_set_with_ttl(transaction, str("stays"), str("5"), minute, &error));
  OK(millrace_client_transaction_commit(transaction, &error));
  CHECK(holds(client, "stays", "5") && left(client, "stays") > 30000);

  /* The server removes it. */
  OK(millrace_client_set_with_ttl(client, str("ends"), str("6"), 10, &error));
  while (left(client, "ends") != MILLRACE_NO_KEY) CHECK(left(client, "ends") <= 10);
  CHECK(holds(client, "ends", NULL));
  OK(millrace_client_delete(client, str("stays"), NULL, &error));
}

/* Iterators and transactions go on without the handle of their client. */
static void handles(const char *address, const millrace_client_options *options) {
  millrace_client *client = NULL;
  millrace_client_transaction *transaction = NULL;
  millrace_iter *iter = NULL;
  OK(millrace_client_connect(address, options, &client, &error));
  set(client, "k", "v");
  set(client, "l", "v");
  OK(millrace_client_range(client, str("k"), str("m"), 0, &iter, &error));
  OK(millrace_client_transaction_begin(client, &transaction, &error));
  millrace_client_close(client);
  CHECK(keys_are(iter, "kl"));
  OK(millrace_client_transaction_set(transaction, str("k"), str("w"), &error));
  OK(millrace_client_transaction_commit(transaction, &error));
}

static millrace_cache_stats stats_of(const millrace_client *client) {
  millrace_cache_stats stats;
  memset(&stats, 0xff, sizeof stats);
  OK(millrace_client_cache_stats(client, &stats, sizeof stats, &error));
  return stats;
}

static void cached(const char *address, const millrace_client *other) {
  millrace_client_options *options = with_password();
  millrace_client *client = NULL;
  OK(millrace_client_options_set_cache(options, 16 << 20, &error));
  OK(millrace_client_options_set_read_ahead(options, 1 << 20, &error));
  OK(millrace_client_options_set_index(options, 1 << 20, &error));
  OK(millrace_client_options_set_staleness_max_ms(options, 60000, &error));
  OK(millrace_client_connect(address, options, &client, &error));
  millrace_client_options_free(options);
  set(other, "c", "1");
  OK(millrace_client_wait_coherent(client, &error));
  CHECK(holds(client, "c", "1"));
  millrace_cache_stats before = stats_of(client);
  for (int i = 0; i < 100; i++) CHECK(holds(client, "c", "1"));
  millrace_cache_stats after = stats_of(client);
  CHECK(after.hits == before.hits + 100 && after.misses == before.misses && after.entries >= 1);
  set(other, "c", "2");
  OK(millrace_client_wait_coherent(client, &error));
  CHECK(holds(client, "c", "2") && stats_of(client).invalidations > before.invalidations);
  set(client, "c", "3");
  CHECK(holds(client, "c", "3"));

  /* Programs with an older header know fewer fields, with a newer one more. */
  uint64_t few[1] = {9}, lots[40];
  memset(lots, 0xff, sizeof lots);
  OK(millrace_client_cache_stats(client, (millrace_cache_stats *)(void *)few, sizeof few, &error));
  CHECK(few[0] >= 100);
  OK(millrace_client_cache_stats(client, (millrace_cache_stats *)(void *)lots, sizeof lots, &error));
  CHECK(lots[0] == stats_of(client).hits && lots[39] == 0);
  millrace_client_close(client);

  millrace_cache_stats none = stats_of(other), zero;
  memset(&zero, 0, sizeof zero);
  CHECK(memcmp(&none, &zero, sizeof zero) == 0);
}

static void options_and_addresses(const char *address, const char *authority, const char *tls_address) {
  millrace_client_options *options = with_password();
  millrace_client *client = NULL;
  OK(millrace_client_options_set_user(options, "default", &error));
  OK(millrace_client_options_set_database(options, 0, &error));
  OK(millrace_client_options_set_timeout_ms(options, 10000, &error));
  OK(millrace_client_options_set_connect_timeout_ms(options, 10000, &error));
  OK(millrace_client_options_set_retry(options, 0, &error));
  OK(millrace_client_options_set_reply_bytes_max(options, 1000, &error));
  OK(millrace_client_connect(address, options, &client, &error));
  char large[2000] = {0};
  millrace_value value;
  OK(millrace_client_set(client, str("k"), millrace_bytes(large, sizeof large), &error));
  FAILS(MILLRACE_PROTOCOL, millrace_client_get(client, str("k"), &value, &error));
  CHECK(value.data == NULL);
  millrace_client_close(client);
  millrace_client_options_free(options);

  char url[512];
  CHECK(snprintf(url, sizeof url, "redis://:secret@%s/0", address) < (int)sizeof url);
  OK(millrace_client_connect(url, NULL, &client, &error));
  set(client, "k", "v");
  millrace_client_close(client);

  options = with_password();
  OK(millrace_client_options_set_tls(options, 1, &error));
  FAILS(MILLRACE_DENIED, millrace_client_connect(tls_address, options, &client, &error));
  CHECK(client == NULL);
  OK(millrace_client_options_set_tls_authority(options, authority, &error));
  OK(millrace_client_connect(tls_address, options, &client, &error));
  CHECK(holds(client, "k", "v"));
  millrace_client_close(client);
  OK(millrace_client_options_set_tls_server_name(options, "other.example", &error));
  FAILS(MILLRACE_DENIED, millrace_client_connect(tls_address, options, &client, &error));
  OK(millrace_client_options_set_tls_certificate(options, authority, "/nonexistent", &error));
  FAILS(MILLRACE_INVALID_OPTION, millrace_client_connect(tls_address, options, &client, &error));
  OK(millrace_client_options_set_tls(options, 0, &error));
  OK(millrace_client_connect(address, options, &client, &error));
  millrace_client_close(client);
  millrace_client_options_free(options);
}

int main(int argc, char **argv) {
  CHECK(argc == 4);
  char authority[512];
  path_in(authority, sizeof authority, argv[1], "ca.pem");
  millrace_client_options *options = with_password();
  millrace_client *client = NULL;
  OK(millrace_client_connect(argv[2], options, &client, &error));
  keys(client);
  many(client);
  ranges(client);
  pages(client);
  transactions(client);
  deadlines(client);
  handles(argv[2], options);
  cached(argv[2], client);
  millrace_client_close(client);
  millrace_client_options_free(options);
  options_and_addresses(argv[2], authority, argv[3]);
  return 0;
}

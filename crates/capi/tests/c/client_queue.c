/* client_queue DIR ADDRESS BAD-LINE NOBODY: asynchronous calls of a client. The node wants the password "secret". BAD-LINE
 * leads to it, but is cut by requests with "cut", and swallows those with "stall". */
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

static millrace_async_client *connect_to(const char *address, int timeout_ms, size_t cache) {
  millrace_client_options *options = millrace_client_options_new();
  millrace_async_client *client = NULL;
  OK(millrace_client_options_set_password(options, "secret", &error));
  OK(millrace_client_options_set_timeout_ms(options, (uint64_t)timeout_ms, &error));
  OK(millrace_client_options_set_cache(options, cache, &error));
  OK(millrace_async_client_connect(address, options, &client, &error));
  millrace_client_options_free(options);
  return client;
}

/* Waits for one completion, which must have this tag and code. */
static millrace_completion next(const millrace_queue *queue, uint64_t tag, int code) {
  millrace_completion done;
  while (millrace_queue_take(queue, &done, 1) == 0) {
    struct pollfd fd = {.fd = millrace_queue_fd(queue), .events = POLLIN};
    CHECK(poll(&fd, 1, 20000) == 1);
  }
  if ((int)done.code != code) fprintf(stderr, "%s\n", millrace_error_message(done.error));
  CHECK(done.tag == tag && (int)done.code == code && (done.error == NULL) == (code == MILLRACE_OK));
  return done;
}

static void ends(const millrace_queue *queue, uint64_t tag, int code) {
  millrace_completion done = next(queue, tag, code);
  CHECK(done.value.data == NULL && done.values == NULL && done.count == 0);
  millrace_completion_free(&done);
  CHECK(done.error == NULL);
  millrace_completion_free(&done);
}

static int holds(const millrace_async_client *client, const millrace_queue *queue, const char *key, const char *text) {
  OK(millrace_async_client_get(client, queue, str(key), 77, &error));
  millrace_completion done = next(queue, 77, MILLRACE_OK);
  int same = text == NULL ? done.value.data == NULL : is(millrace_bytes(done.value.data, done.value.size), text);
  millrace_completion_free(&done);
  CHECK(done.value.data == NULL);
  return same;
}

static void calls(const millrace_async_client *client, const millrace_queue *queue) {
  CHECK(holds(client, queue, "a", NULL));
  /* What is passed may be changed when the call returns. */
  char key[2] = "a", value[2] = "1";
  OK(millrace_async_client_set(client, queue, str(key), str(value), 1, &error));
  key[0] = value[0] = 'x';
  ends(queue, 1, MILLRACE_OK);
  CHECK(holds(client, queue, "a", "1"));

  millrace_client_batch *batch = millrace_client_batch_new();
  OK(millrace_client_batch_set(batch, str("b"), str(""), &error));
  OK(millrace_async_client_write(client, queue, batch, 2, &error));
  CHECK(millrace_client_batch_count(batch) == 0);
  ends(queue, 2, MILLRACE_OK);
  millrace_client_batch_free(batch);

  millrace_slice names[3];
  names[0] = str("b");
  names[1] = str("c");
  names[2] = str("a");
  OK(millrace_async_client_multi_get(client, queue, names, 3, 3, &error));
  millrace_completion done = next(queue, 3, MILLRACE_OK);
  CHECK(done.count == 3 && done.value.data == NULL && done.values[0].data != NULL && done.values[0].size == 0);
  CHECK(done.values[1].data == NULL && is(millrace_bytes(done.values[2].data, done.values[2].size), "1"));
  millrace_completion_free(&done);
  CHECK(done.values == NULL && done.count == 0);
  millrace_completion_free(&done);
  OK(millrace_async_client_multi_get(client, queue, NULL, 0, 4, &error));
  done = next(queue, 4, MILLRACE_OK);
  CHECK(done.count == 0);
  millrace_completion_free(&done);

  for (uint64_t expected = 2; expected-- > 0;) {
    OK(millrace_async_client_delete(client, queue, str("a"), 5, &error));
    done = next(queue, 5, MILLRACE_OK);
    CHECK(done.count == expected && done.values == NULL);
    millrace_completion_free(&done);
  }
  OK(millrace_async_client_wait_coherent(client, queue, 6, &error));
  ends(queue, 6, MILLRACE_OK);
  CHECK(holds(client, queue, "a", NULL));
}

/* The number that a call ends with. */
static int64_t counted(const millrace_queue *queue, uint64_t tag) {
  millrace_completion done = next(queue, tag, MILLRACE_OK);
  int64_t count = (int64_t)done.count;
  CHECK(done.value.data == NULL && done.values == NULL);
  millrace_completion_free(&done);
  return count;
}

static void deadlines(const millrace_async_client *client, const millrace_queue *queue) {
  OK(millrace_async_client_set_with_ttl(client, queue, str("ends"), str("1"), 60000, 1, &error));
  ends(queue, 1, MILLRACE_OK);
  CHECK(holds(client, queue, "ends", "1"));
  OK(millrace_async_client_ttl(client, queue, str("ends"), 2, &error));
  int64_t left = counted(queue, 2);
  CHECK(left > 30000 && left <= 60000);
  for (int expected = 1; expected >= 0; expected--) {
    OK(millrace_async_client_persist(client, queue, str("ends"), 3, &error));
    CHECK(counted(queue, 3) == expected);
  }
  OK(millrace_async_client_ttl(client, queue, str("ends"), 4, &error));
  CHECK(counted(queue, 4) == MILLRACE_FOREVER);
  OK(millrace_async_client_expire(client, queue, str("ends"), 10, 5, &error));
  CHECK(counted(queue, 5) == 1);
  do {
    OK(millrace_async_client_ttl(client, queue, str("ends"), 6, &error));
    left = counted(queue, 6);
    CHECK(left <= 10);
  } while (left != MILLRACE_NO_KEY);
  CHECK(holds(client, queue, "ends", NULL));
  OK(millrace_async_client_expire(client, queue, str("ends"), 10, 7, &error));
  CHECK(counted(queue, 7) == 0);
  /* An impossible time is known at once, and told by the completion. */
  OK(millrace_async_client_set_with_ttl(client, queue, str("ends"), str("1"), 0, 8, &error));
  ends(queue, 8, MILLRACE_INVALID_OPTION);
  OK(millrace_async_client_expire(client, queue, str("ends"), UINT64_MAX, 9, &error));
  ends(queue, 9, MILLRACE_INVALID_OPTION);
}

/* The keys of a range, one after the other. Frees it. */
static int range_is(millrace_async_range *range, const millrace_queue *queue, const char *expected) {
  char keys[256] = "";
  for (;;) {
    OK(millrace_async_range_next(range, queue, 8, &error));
    millrace_completion done = next(queue, 8, MILLRACE_OK);
    CHECK(done.count % 2 == 0 && done.value.data == NULL);
    for (uint64_t i = 0; i < done.count; i += 2) {
      strncat(keys, done.values[i].data, done.values[i].size);
      CHECK(is(millrace_bytes(done.values[i + 1].data, done.values[i + 1].size), "v"));
    }
    uint64_t count = done.count;
    millrace_completion_free(&done);
    if (count == 0) break;
  }
  millrace_async_range_free(range);
  if (strcmp(keys, expected) != 0) fprintf(stderr, "keys: %s\n", keys);
  return strcmp(keys, expected) == 0;
}

static void ranges(const millrace_async_client *client, const millrace_queue *queue) {
  millrace_async_range *range = NULL;
  millrace_client_batch *batch = millrace_client_batch_new();
  for (char key = 'a'; key <= 'e'; key++) {
    char name[3] = {'r', key, 0};
    OK(millrace_client_batch_set(batch, str(name), str("v"), &error));
  }
  OK(millrace_async_client_write(client, queue, batch, 1, &error));
  ends(queue, 1, MILLRACE_OK);
  OK(millrace_async_client_range(client, str("ra"), str("rz"), 0, &range, &error));
  CHECK(range_is(range, queue, "rarbrcrdre"));
  /* What is passed may be changed when the call returns. */
  char start[3] = "rb", end[3] = "rd";
  OK(millrace_async_client_range(client, str(start), str(end), MILLRACE_REVERSE, &range, &error));
  start[1] = end[1] = 'x';
  CHECK(range_is(range, queue, "rcrb"));
  unsigned flags = MILLRACE_EXCLUDE_START | MILLRACE_INCLUDE_END;
  OK(millrace_async_client_range(client, str("rb"), str("rd"), flags, &range, &error));
  CHECK(range_is(range, queue, "rcrd"));
  OK(millrace_async_client_prefix(client, str("r"), MILLRACE_REVERSE, &range, &error));
  CHECK(range_is(range, queue, "rerdrcrbra"));
  OK(millrace_async_client_prefix(client, str("none"), 0, &range, &error));
  CHECK(range_is(range, queue, ""));
  OK(millrace_async_client_delete_range(client, queue, str("ra"), str("rc"), 2, &error));
  CHECK(counted(queue, 2) == 2);
  OK(millrace_async_client_delete_range(client, queue, str("r"), str("s"), 3, &error));
  CHECK(counted(queue, 3) == 3);

  /* More entries than one page has; of each call, several. */
  char text[1000];
  memset(text, 'v', sizeof text);
  for (int i = 0; i < 500; i++) {
    char key[16];
    snprintf(key, sizeof key, "r%04d", i);
    OK(millrace_client_batch_set(batch, str(key), millrace_bytes(text, sizeof text), &error));
  }
  OK(millrace_async_client_write(client, queue, batch, 4, &error));
  ends(queue, 4, MILLRACE_OK);
  millrace_client_batch_free(batch);
  OK(millrace_async_client_prefix(client, str("r"), 0, &range, &error));
  int seen = 0, calls = 0;
  for (uint64_t count = 1; count > 0; calls++) {
    OK(millrace_async_range_next(range, queue, 5, &error));
    millrace_completion done = next(queue, 5, MILLRACE_OK);
    count = done.count;
    for (uint64_t i = 0; i < count; i += 2) {
      char expected[16];
      snprintf(expected, sizeof expected, "r%04d", seen++);
      CHECK(is(millrace_bytes(done.values[i].data, done.values[i].size), expected));
      CHECK(done.values[i + 1].size == sizeof text);
    }
    millrace_completion_free(&done);
  }
  CHECK(seen == 500 && calls > 3 && calls < 50);
  /* The end stays the end. */
  OK(millrace_async_range_next(range, queue, 6, &error));
  millrace_completion done = next(queue, 6, MILLRACE_OK);
  CHECK(done.count == 0);
  millrace_completion_free(&done);
  millrace_async_range_free(range);

  /* One that is freed while its operation is on its way. */
  OK(millrace_async_client_prefix(client, str("r"), 0, &range, &error));
  OK(millrace_async_range_next(range, queue, 7, &error));
  millrace_async_range_free(range);
  done = next(queue, 7, MILLRACE_OK);
  CHECK(done.count > 0);
  millrace_completion_free(&done);
  OK(millrace_async_client_delete_range(client, queue, str("r"), str("s"), 8, &error));
  CHECK(counted(queue, 8) == 500);
}

static int finds(const millrace_async_transaction *transaction, const millrace_queue *queue, const char *key,
                 const char *text) {
  OK(millrace_async_transaction_get(transaction, queue, str(key), 9, &error));
  millrace_completion done = next(queue, 9, MILLRACE_OK);
  int same = text == NULL ? done.value.data == NULL : is(millrace_bytes(done.value.data, done.value.size), text);
  millrace_completion_free(&done);
  return same;
}

static void transactions(const millrace_async_client *client, const millrace_queue *queue) {
  millrace_async_transaction *transaction = NULL;
  OK(millrace_async_client_set(client, queue, str("n"), str("1"), 1, &error));
  ends(queue, 1, MILLRACE_OK);
  OK(millrace_async_transaction_begin(client, &transaction, &error));
  CHECK(finds(transaction, queue, "n", "1") && finds(transaction, queue, "m", NULL));
  OK(millrace_async_transaction_set(transaction, str("n"), str("2"), &error));
  OK(millrace_async_transaction_set_with_ttl(transaction, str("m"), str("2"), 60000, &error));
  OK(millrace_async_transaction_delete(transaction, str("x"), &error));
  CHECK(holds(client, queue, "n", "1"));
  OK(millrace_async_transaction_get(transaction, queue, str("n"), 2, &error));
  millrace_completion done = next(queue, 2, MILLRACE_OK);
  CHECK(is(millrace_bytes(done.value.data, done.value.size), "2"));
  millrace_completion_free(&done);
  OK(millrace_async_transaction_commit(transaction, queue, 3, &error));
  FAILS(MILLRACE_INVALID_ARGUMENT, millrace_async_transaction_commit(transaction, queue, 4, &error));
  FAILS(MILLRACE_INVALID_ARGUMENT, millrace_async_transaction_delete(transaction, str("n"), &error));
  millrace_async_transaction_free(transaction);
  ends(queue, 3, MILLRACE_OK);
  CHECK(holds(client, queue, "n", "2") && holds(client, queue, "m", "2"));
  OK(millrace_async_client_ttl(client, queue, str("m"), 5, &error));
  CHECK(counted(queue, 5) > 30000);

  OK(millrace_async_transaction_begin(client, &transaction, &error));
  CHECK(finds(transaction, queue, "n", "2"));
  OK(millrace_async_client_set(client, queue, str("n"), str("3"), 6, &error));
  ends(queue, 6, MILLRACE_OK);
  OK(millrace_async_transaction_set(transaction, str("n"), str("4"), &error));
  OK(millrace_async_transaction_commit(transaction, queue, 7, &error));
  ends(queue, 7, MILLRACE_CONFLICT);
  millrace_async_transaction_free(transaction);
  CHECK(holds(client, queue, "n", "3"));

  OK(millrace_async_transaction_begin(client, &transaction, &error));
  OK(millrace_async_transaction_set(transaction, str("n"), str("5"), &error));
  millrace_async_transaction_free(transaction);
  CHECK(holds(client, queue, "n", "3"));
  OK(millrace_async_client_delete(client, queue, str("m"), 8, &error));
  CHECK(counted(queue, 8) == 1);
}

/* Many at once, more than the connection takes: each has one completion. */
static void many(const millrace_async_client *client) {
  enum { MANY = 3000 };
  millrace_queue *queue = NULL;
  static unsigned char seen[MANY];
  memset(seen, 0, sizeof seen);
  OK(millrace_queue_new(MANY, &queue, &error));
  for (int i = 0; i < MANY; i++) {
    char text[16];
    snprintf(text, sizeof text, "many-%d", i);
    OK(millrace_async_client_set(client, queue, str(text), str(text), (uint64_t)i, &error));
  }
  millrace_error *error = NULL;
  CHECK(millrace_async_client_get(client, queue, str("many"), 0, &error) == MILLRACE_BUSY && error != NULL);
  millrace_error_free(error);
  for (int left = MANY; left > 0;) {
    millrace_completion done[100];
    struct pollfd fd = {.fd = millrace_queue_fd(queue), .events = POLLIN};
    CHECK(poll(&fd, 1, 20000) == 1);
    size_t count = millrace_queue_take(queue, done, 100);
    for (size_t i = 0; i < count; i++) {
      CHECK(done[i].code == MILLRACE_OK && seen[done[i].tag]++ == 0);
      millrace_completion_free(&done[i]);
      left--;
    }
  }
  for (int i = 0; i < MANY; i += 100) {
    char text[16];
    snprintf(text, sizeof text, "many-%d", i);
    CHECK(holds(client, queue, text, text));
  }
  millrace_queue_free(queue);
}

static void cached(const char *address, const millrace_queue *queue) {
  millrace_async_client *client = connect_to(address, 20000, 1 << 20), *other = connect_to(address, 20000, 0);
  millrace_cache_stats stats;
  OK(millrace_async_client_set(other, queue, str("c"), str("1"), 1, &error));
  ends(queue, 1, MILLRACE_OK);
  for (int i = 0; i < 10; i++) CHECK(holds(client, queue, "c", "1"));
  OK(millrace_async_client_cache_stats(client, &stats, sizeof stats, &error));
  CHECK(stats.misses == 1 && stats.hits == 9);
  OK(millrace_async_client_set(other, queue, str("c"), str("2"), 2, &error));
  ends(queue, 2, MILLRACE_OK);
  OK(millrace_async_client_wait_coherent(client, queue, 3, &error));
  ends(queue, 3, MILLRACE_OK);
  CHECK(holds(client, queue, "c", "2"));
  millrace_async_client_close(client);
  millrace_async_client_close(other);
}

static void faults(const char *bad_line, const char *nobody, const millrace_queue *queue) {
  millrace_async_client *client = (millrace_async_client *)1;
  FAILS(MILLRACE_UNREACHABLE, millrace_async_client_connect(nobody, NULL, &client, &error));
  CHECK(client == NULL);
  FAILS(MILLRACE_DENIED, millrace_async_client_connect(bad_line, NULL, &client, &error));
  client = connect_to(bad_line, 400, 0);
  OK(millrace_async_client_set(client, queue, str("k"), str("v"), 1, &error));
  ends(queue, 1, MILLRACE_OK);
  OK(millrace_async_client_set(client, queue, str("cut"), str("v"), 2, &error));
  ends(queue, 2, MILLRACE_OUTCOME_UNKNOWN);
  OK(millrace_async_client_get(client, queue, str("cut"), 3, &error));
  /* It is made again until its time is over. */
  millrace_completion done;
  while (millrace_queue_take(queue, &done, 1) == 0) {
    struct pollfd fd = {.fd = millrace_queue_fd(queue), .events = POLLIN};
    CHECK(poll(&fd, 1, 20000) == 1);
  }
  CHECK(done.tag == 3 && (done.code == MILLRACE_UNREACHABLE || done.code == MILLRACE_TIMEOUT));
  millrace_completion_free(&done);
  millrace_async_client_close(client);

  /* Another one, which does not pause after many connections that were of no use. */
  client = connect_to(bad_line, 2000, 0);
  OK(millrace_async_client_delete(client, queue, str("stall"), 4, &error));
  ends(queue, 4, MILLRACE_OUTCOME_UNKNOWN);
  CHECK(holds(client, queue, "k", "v"));
  millrace_async_client_close(client);

  /* A client that is closed while operations are on their way. */
  client = connect_to(bad_line, 20000, 0);
  OK(millrace_async_client_get(client, queue, str("stall"), 5, &error));
  millrace_async_client_close(client);
  ends(queue, 5, MILLRACE_CLOSED);
  client = connect_to(bad_line, 20000, 0);
  OK(millrace_async_client_set(client, queue, str("stall"), str("v"), 6, &error));
  millrace_async_client_close(client);
  ends(queue, 6, MILLRACE_OUTCOME_UNKNOWN);

  /* What outlives its client: an operation that was on its way, and those that begin later. */
  client = connect_to(bad_line, 20000, 0);
  millrace_async_range *range = NULL, *idle = NULL;
  millrace_async_transaction *transaction = NULL, *begun = NULL, *busy = NULL;
  OK(millrace_async_client_prefix(client, str("stall"), 0, &range, &error));
  OK(millrace_async_client_prefix(client, str("k"), 0, &idle, &error));
  OK(millrace_async_transaction_begin(client, &begun, &error));
  OK(millrace_async_transaction_begin(client, &transaction, &error));
  OK(millrace_async_transaction_get(transaction, queue, str("k"), 7, &error));
  done = next(queue, 7, MILLRACE_OK);
  CHECK(is(millrace_bytes(done.value.data, done.value.size), "v"));
  millrace_completion_free(&done);
  OK(millrace_async_range_next(range, queue, 8, &error));
  /* One operation at a time. */
  FAILS(MILLRACE_BUSY, millrace_async_range_next(range, queue, 9, &error));
  OK(millrace_async_transaction_begin(client, &busy, &error));
  OK(millrace_async_transaction_get(busy, queue, str("stall"), 13, &error));
  FAILS(MILLRACE_BUSY, millrace_async_transaction_get(busy, queue, str("k"), 14, &error));
  FAILS(MILLRACE_BUSY, millrace_async_transaction_set(busy, str("k"), str("w"), &error));
  FAILS(MILLRACE_BUSY, millrace_async_transaction_commit(busy, queue, 14, &error));
  millrace_async_transaction_free(busy);
  millrace_async_client_close(client);
  for (int closed = 0; closed < 2; closed++) {
    while (millrace_queue_take(queue, &done, 1) == 0) {
      struct pollfd fd = {.fd = millrace_queue_fd(queue), .events = POLLIN};
      CHECK(poll(&fd, 1, 20000) == 1);
    }
    CHECK((done.tag == 8 || done.tag == 13) && done.code == MILLRACE_CLOSED);
    millrace_completion_free(&done);
  }
  OK(millrace_async_range_next(range, queue, 9, &error));
  ends(queue, 9, MILLRACE_CLOSED);
  OK(millrace_async_range_next(idle, queue, 10, &error));
  ends(queue, 10, MILLRACE_CLOSED);
  OK(millrace_async_transaction_get(transaction, queue, str("k"), 11, &error));
  ends(queue, 11, MILLRACE_CLOSED);
  OK(millrace_async_transaction_set(transaction, str("k"), str("w"), &error));
  OK(millrace_async_transaction_commit(transaction, queue, 12, &error));
  ends(queue, 12, MILLRACE_CLOSED);
  OK(millrace_async_transaction_set(begun, str("k"), str("w"), &error));
  millrace_async_range_free(range);
  millrace_async_range_free(idle);
  millrace_async_transaction_free(transaction);
  millrace_async_transaction_free(begun);

  /* A commit whose answer is lost. */
  client = connect_to(bad_line, 20000, 0);
  OK(millrace_async_transaction_begin(client, &transaction, &error));
  OK(millrace_async_transaction_get(transaction, queue, str("k"), 13, &error));
  done = next(queue, 13, MILLRACE_OK);
  CHECK(is(millrace_bytes(done.value.data, done.value.size), "v"));
  millrace_completion_free(&done);
  OK(millrace_async_transaction_set(transaction, str("k"), str("cut"), &error));
  OK(millrace_async_transaction_commit(transaction, queue, 14, &error));
  ends(queue, 14, MILLRACE_OUTCOME_UNKNOWN);
  millrace_async_transaction_free(transaction);
  CHECK(holds(client, queue, "k", "v"));
  millrace_async_client_close(client);

  /* A queue that is freed waits for them. */
  millrace_queue *other = NULL;
  OK(millrace_queue_new(10, &other, &error));
  client = connect_to(bad_line, 200, 0);
  OK(millrace_async_client_get(client, other, str("stall"), 7, &error));
  OK(millrace_async_client_multi_get(client, other, NULL, 0, 8, &error));
  millrace_queue_free(other);
  millrace_async_client_close(client);
}

static void mistakes(const millrace_async_client *client, const millrace_queue *queue) {
  const int bad = MILLRACE_INVALID_ARGUMENT;
  millrace_slice k = str("k"), hole = millrace_bytes(NULL, 5), huge = millrace_bytes("", SIZE_MAX);
  millrace_async_client *made = (millrace_async_client *)1;
  millrace_client_batch *batch = millrace_client_batch_new();
  millrace_cache_stats stats;
  millrace_async_client_close(NULL);
  FAILS(bad, millrace_async_client_connect(NULL, NULL, &made, &error));
  CHECK(made == NULL);
  FAILS(bad, millrace_async_client_connect("127.0.0.1:1", NULL, NULL, &error));
  FAILS(MILLRACE_INVALID_OPTION, millrace_async_client_connect("host", NULL, &made, &error));
  FAILS(bad, millrace_async_client_get(NULL, queue, k, 0, &error));
  FAILS(bad, millrace_async_client_get(client, NULL, k, 0, &error));
  FAILS(bad, millrace_async_client_get(client, queue, hole, 0, &error));
  FAILS(bad, millrace_async_client_multi_get(client, queue, NULL, 1, 0, &error));
  FAILS(bad, millrace_async_client_multi_get(client, queue, &hole, 1, 0, &error));
  FAILS(bad, millrace_async_client_set(client, queue, k, huge, 0, &error));
  FAILS(bad, millrace_async_client_delete(client, queue, hole, 0, &error));
  FAILS(bad, millrace_async_client_set_with_ttl(client, queue, k, huge, 1, 0, &error));
  FAILS(bad, millrace_async_client_expire(client, queue, hole, 1, 0, &error));
  FAILS(bad, millrace_async_client_persist(client, NULL, k, 0, &error));
  FAILS(bad, millrace_async_client_ttl(NULL, queue, k, 0, &error));
  FAILS(bad, millrace_async_client_write(client, queue, NULL, 0, &error));
  FAILS(bad, millrace_async_client_wait_coherent(NULL, queue, 0, &error));
  FAILS(bad, millrace_async_client_cache_stats(NULL, &stats, sizeof stats, &error));
  FAILS(bad, millrace_async_client_cache_stats(client, &stats, 3, &error));
  millrace_async_range *range = (millrace_async_range *)1;
  millrace_async_transaction *transaction = (millrace_async_transaction *)1;
  millrace_async_range_free(NULL);
  millrace_async_transaction_free(NULL);
  FAILS(bad, millrace_async_client_range(NULL, k, k, 0, &range, &error));
  CHECK(range == NULL);
  FAILS(bad, millrace_async_client_range(client, k, k, 0, NULL, &error));
  FAILS(bad, millrace_async_client_range(client, k, hole, 0, &range, &error));
  FAILS(bad, millrace_async_client_range(client, k, k, 8, &range, &error));
  FAILS(bad, millrace_async_client_prefix(client, k, MILLRACE_INCLUDE_END, &range, &error));
  FAILS(bad, millrace_async_client_prefix(client, hole, 0, &range, &error));
  FAILS(bad, millrace_async_client_delete_range(client, queue, k, hole, 0, &error));
  FAILS(bad, millrace_async_range_next(NULL, queue, 0, &error));
  OK(millrace_async_client_prefix(client, k, 0, &range, &error));
  FAILS(bad, millrace_async_range_next(range, NULL, 0, &error));
  FAILS(bad, millrace_async_transaction_begin(NULL, &transaction, &error));
  CHECK(transaction == NULL);
  FAILS(bad, millrace_async_transaction_begin(client, NULL, &error));
  FAILS(bad, millrace_async_transaction_get(NULL, queue, k, 0, &error));
  FAILS(bad, millrace_async_transaction_set(NULL, k, k, &error));
  FAILS(bad, millrace_async_transaction_set_with_ttl(NULL, k, k, 1, &error));
  FAILS(bad, millrace_async_transaction_delete(NULL, k, &error));
  FAILS(bad, millrace_async_transaction_commit(NULL, queue, 0, &error));
  OK(millrace_async_transaction_begin(client, &transaction, &error));
  FAILS(bad, millrace_async_transaction_get(transaction, queue, hole, 0, &error));
  FAILS(bad, millrace_async_transaction_get(transaction, NULL, k, 0, &error));
  FAILS(bad, millrace_async_transaction_set(transaction, k, huge, &error));
  FAILS(bad, millrace_async_transaction_set_with_ttl(transaction, hole, k, 1, &error));
  FAILS(bad, millrace_async_transaction_delete(transaction, hole, &error));
  FAILS(bad, millrace_async_transaction_commit(transaction, NULL, 0, &error));
  millrace_completion done;
  CHECK(millrace_queue_take(queue, &done, 1) == 0);
  /* A call that is refused leaves its transaction as it was. */
  OK(millrace_async_transaction_set_with_ttl(transaction, k, k, 0, &error));
  OK(millrace_async_transaction_commit(transaction, queue, 1, &error));
  ends(queue, 1, MILLRACE_INVALID_OPTION);
  millrace_async_transaction_free(transaction);
  millrace_async_range_free(range);

  /* A call that is refused leaves its batch as it was. */
  millrace_queue *small = NULL;
  OK(millrace_queue_new(1, &small, &error));
  OK(millrace_async_client_get(client, small, k, 1, &error));
  OK(millrace_client_batch_set(batch, k, k, &error));
  FAILS(MILLRACE_BUSY, millrace_async_client_write(client, small, batch, 2, &error));
  CHECK(millrace_client_batch_count(batch) == 1);
  millrace_client_batch_free(batch);
  millrace_queue_free(small);
}

static void forked(const char *address, const millrace_async_client *client, const millrace_queue *queue) {
  OK(millrace_async_client_set(client, queue, str("parent"), str("yes"), 1, &error));
  ends(queue, 1, MILLRACE_OK);
  millrace_async_range *range = NULL;
  millrace_async_transaction *transaction = NULL;
  OK(millrace_async_client_prefix(client, str("parent"), 0, &range, &error));
  OK(millrace_async_transaction_begin(client, &transaction, &error));
  CHECK(finds(transaction, queue, "parent", "yes"));
  pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    FAILS(MILLRACE_CLOSED, millrace_async_client_get(client, queue, str("parent"), 2, &error));
    FAILS(MILLRACE_CLOSED, millrace_async_range_next(range, queue, 2, &error));
    FAILS(MILLRACE_CLOSED, millrace_async_transaction_set(transaction, str("parent"), str("no"), &error));
    FAILS(MILLRACE_CLOSED, millrace_async_transaction_commit(transaction, queue, 2, &error));
    millrace_async_range_free(range);
    millrace_async_transaction_free(transaction);
    millrace_async_client_close((millrace_async_client *)client);
    millrace_queue *own = NULL;
    OK(millrace_queue_new(10, &own, &error));
    millrace_async_client *again = connect_to(address, 10000, 0);
    CHECK(holds(again, own, "parent", "yes"));
    millrace_async_client_close(again);
    millrace_queue_free(own);
    _exit(0);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
  CHECK(holds(client, queue, "parent", "yes"));
  OK(millrace_async_range_next(range, queue, 3, &error));
  millrace_completion done = next(queue, 3, MILLRACE_OK);
  CHECK(done.count == 2 && is(millrace_bytes(done.values[1].data, done.values[1].size), "yes"));
  millrace_completion_free(&done);
  OK(millrace_async_transaction_set(transaction, str("parent"), str("still"), &error));
  OK(millrace_async_transaction_commit(transaction, queue, 4, &error));
  ends(queue, 4, MILLRACE_OK);
  CHECK(holds(client, queue, "parent", "still"));
  millrace_async_range_free(range);
  millrace_async_transaction_free(transaction);
}

#define THREADS 6
#define EACH 500
static millrace_async_client *common;
static millrace_queue *common_queue;
static atomic_int left = THREADS * EACH;
static atomic_uchar taken[THREADS * EACH];

/* Sets, and takes completions, which may be those of others, until all are taken. */
static void *work(void *argument) {
  int thread = *(int *)argument;
  int sent = 0;
  while (atomic_load(&left) > 0) {
    for (int burst = 0; burst < 20 && sent < EACH; burst++) {
      char key[64];
      snprintf(key, sizeof key, "t-%d-%d", thread, sent);
      millrace_code code = millrace_async_client_set(common, common_queue, str(key), str(key),
                                                     (uint64_t)(thread * EACH + sent), NULL);
      if (code == MILLRACE_BUSY) break;
      CHECK(code == MILLRACE_OK);
      sent++;
    }
    millrace_completion done[5];
    size_t count = millrace_queue_take(common_queue, done, 5);
    for (size_t i = 0; i < count; i++) {
      CHECK(done[i].code == MILLRACE_OK && atomic_fetch_add(&taken[done[i].tag], 1) == 0);
      atomic_fetch_sub(&left, 1);
      millrace_completion_free(&done[i]);
    }
    if (count == 0) {
      /* Another thread may take what this one waits for. */
      struct pollfd fd = {.fd = millrace_queue_fd(common_queue), .events = POLLIN};
      CHECK(poll(&fd, 1, 5) >= 0);
    }
  }
  return NULL;
}

static void threads(const char *address) {
  common = connect_to(address, 30000, 1 << 20);
  OK(millrace_queue_new(200, &common_queue, &error));
  pthread_t all[THREADS];
  int numbers[THREADS];
  for (int i = 0; i < THREADS; i++) {
    numbers[i] = i;
    CHECK(pthread_create(&all[i], NULL, work, &numbers[i]) == 0);
  }
  for (int i = 0; i < THREADS; i++) CHECK(pthread_join(all[i], NULL) == 0);
  CHECK(atomic_load(&left) == 0);
  for (int i = 0; i < EACH; i++) {
    char key[64];
    snprintf(key, sizeof key, "t-%d-%d", i % THREADS, i);
    CHECK(holds(common, common_queue, key, key));
  }
  millrace_queue_free(common_queue);
  millrace_async_client_close(common);
}

int main(int argc, char **argv) {
  CHECK(argc == 5);
  millrace_queue *queue = NULL;
  OK(millrace_queue_new(10, &queue, &error));
  for (size_t cache = 0; cache <= 1 << 20; cache += 1 << 20) {
    millrace_async_client *client = connect_to(argv[2], 20000, cache);
    OK(millrace_async_client_delete(client, queue, str("b"), 0, &error));
    millrace_completion done = next(queue, 0, MILLRACE_OK);
    millrace_completion_free(&done);
    calls(client, queue);
    deadlines(client, queue);
    ranges(client, queue);
    transactions(client, queue);
    many(client);
    mistakes(client, queue);
    forked(argv[2], client, queue);
    millrace_async_client_close(client);
  }
  cached(argv[2], queue);
  faults(argv[3], argv[4], queue);
  threads(argv[2]);
  millrace_queue_free(queue);
  return 0;
}

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
  FAILS(bad, millrace_async_client_write(client, queue, NULL, 0, &error));
  FAILS(bad, millrace_async_client_wait_coherent(NULL, queue, 0, &error));
  FAILS(bad, millrace_async_client_cache_stats(NULL, &stats, sizeof stats, &error));
  FAILS(bad, millrace_async_client_cache_stats(client, &stats, 3, &error));
  millrace_completion done;
  CHECK(millrace_queue_take(queue, &done, 1) == 0);

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
  pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    FAILS(MILLRACE_CLOSED, millrace_async_client_get(client, queue, str("parent"), 2, &error));
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

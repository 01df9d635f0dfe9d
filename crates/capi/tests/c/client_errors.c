/* client_errors DIR ADDRESS BAD-LINE NOBODY STRANGER: every mistake and fault of a client has its code. The node wants the
 * password "secret". BAD-LINE leads to it, but is cut by requests with "cut", and swallows those with "stall". */
#include <signal.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

static millrace_client *connect_to(const char *address, const char *password, int timeout_ms, size_t cache) {
  millrace_client_options *options = millrace_client_options_new();
  millrace_client *client = NULL;
  OK(millrace_client_options_set_password(options, password, &error));
  OK(millrace_client_options_set_timeout_ms(options, (uint64_t)timeout_ms, &error));
  OK(millrace_client_options_set_cache(options, cache, &error));
  OK(millrace_client_connect(address, options, &client, &error));
  millrace_client_options_free(options);
  return client;
}

static int holds(const millrace_client *client, const char *key, const char *text) {
  millrace_value value;
  OK(millrace_client_get(client, str(key), &value, &error));
  return value_is(value, text);
}

/* NULL is freed and counted; everything else refuses it. */
static void null(void) {
  millrace_client_close(NULL);
  millrace_client_options_free(NULL);
  millrace_client_batch_free(NULL);
  millrace_client_batch_clear(NULL);
  millrace_client_transaction_free(NULL);
  CHECK(millrace_client_batch_count(NULL) == 0 && millrace_client_batch_bytes(NULL) == 0);

  const int bad = MILLRACE_INVALID_ARGUMENT;
  millrace_slice k = str("k");
  millrace_value v;
  millrace_client *client = (millrace_client *)1;
  millrace_iter *iter = (millrace_iter *)1;
  millrace_client_transaction *transaction = NULL;
  millrace_cache_stats stats;
  bool existed = true;
  uint64_t count = 1;
  FAILS(bad, millrace_client_connect(NULL, NULL, &client, &error));
  CHECK(client == NULL);
  FAILS(bad, millrace_client_connect("127.0.0.1:1", NULL, NULL, &error));
  FAILS(bad, millrace_client_get(NULL, k, &v, &error));
  CHECK(v.data == NULL);
  memset(&v, 0xff, sizeof v);
  FAILS(bad, millrace_client_multi_get(NULL, &k, 1, &v, &error));
  CHECK(v.data == NULL);
  FAILS(bad, millrace_client_set(NULL, k, k, &error));
  FAILS(bad, millrace_client_delete(NULL, k, &existed, &error));
  FAILS(bad, millrace_client_delete_range(NULL, k, k, &count, &error));
  CHECK(!existed && count == 0);
  existed = true;
  FAILS(bad, millrace_client_set_with_ttl(NULL, k, k, 1, &error));
  FAILS(bad, millrace_client_expire(NULL, k, 1, &existed, &error));
  CHECK(!existed);
  existed = true;
  FAILS(bad, millrace_client_persist(NULL, k, &existed, &error));
  CHECK(!existed);
  int64_t ttl_ms = 1;
  FAILS(bad, millrace_client_ttl(NULL, k, &ttl_ms, &error));
  CHECK(ttl_ms == MILLRACE_NO_KEY);
  FAILS(bad, millrace_client_batch_set_with_ttl(NULL, k, k, 1, &error));
  FAILS(bad, millrace_client_transaction_set_with_ttl(NULL, k, k, 1, &error));
  FAILS(bad, millrace_client_write(NULL, NULL, &error));
  FAILS(bad, millrace_client_range(NULL, k, k, 0, &iter, &error));
  CHECK(iter == NULL);
  FAILS(bad, millrace_client_prefix(NULL, k, 0, &iter, &error));
  FAILS(bad, millrace_client_wait_coherent(NULL, &error));
  FAILS(bad, millrace_client_cache_stats(NULL, &stats, sizeof stats, &error));
  FAILS(bad, millrace_client_batch_set(NULL, k, k, &error));
  FAILS(bad, millrace_client_batch_delete(NULL, k, &error));
  FAILS(bad, millrace_client_batch_delete_range(NULL, k, k, &error));
  FAILS(bad, millrace_client_transaction_begin(NULL, &transaction, &error));
  FAILS(bad, millrace_client_transaction_get(NULL, k, &v, &error));
  FAILS(bad, millrace_client_transaction_set(NULL, k, k, &error));
  FAILS(bad, millrace_client_transaction_delete(NULL, k, &error));
  FAILS(bad, millrace_client_transaction_commit(NULL, &error));
  FAILS(bad, millrace_client_options_set_password(NULL, "x", &error));
  FAILS(bad, millrace_client_options_set_cache(NULL, 0, &error));
  FAILS(bad, millrace_client_options_set_tls(NULL, 1, &error));
  FAILS(bad, millrace_client_options_set_tls_authority(NULL, "x", &error));
}

static void options(const char *address) {
  millrace_client_options *options = millrace_client_options_new();
  millrace_client *client = (millrace_client *)1;
  FAILS(MILLRACE_INVALID_ARGUMENT, millrace_client_options_set_password(options, NULL, &error));
  FAILS(MILLRACE_INVALID_ARGUMENT, millrace_client_options_set_user(options, "\xff", &error));
  FAILS(MILLRACE_INVALID_ARGUMENT, millrace_client_options_set_tls_authority(options, NULL, &error));
  FAILS(MILLRACE_INVALID_ARGUMENT, millrace_client_options_set_tls_certificate(options, "x", NULL, &error));
  FAILS(MILLRACE_INVALID_ARGUMENT, millrace_client_options_set_tls_server_name(options, NULL, &error));
  const char *addresses[] = {"", "host", "host:x", "http://host:1", "[::1:1", "\xff:1"};
  for (int i = 0; i < 5; i++) {
    FAILS(MILLRACE_INVALID_OPTION, millrace_client_connect(addresses[i], NULL, &client, &error));
    CHECK(client == NULL);
  }
  FAILS(MILLRACE_INVALID_ARGUMENT, millrace_client_connect(addresses[5], NULL, &client, &error));
  OK(millrace_client_options_set_timeout_ms(options, 0, &error));
  FAILS(MILLRACE_INVALID_OPTION, millrace_client_connect(address, options, &client, &error));
  OK(millrace_client_options_set_timeout_ms(options, UINT64_MAX, &error));
  FAILS(MILLRACE_INVALID_OPTION, millrace_client_connect(address, options, &client, &error));
  OK(millrace_client_options_set_timeout_ms(options, 1000, &error));
  OK(millrace_client_options_set_cache(options, 1, &error));
  FAILS(MILLRACE_INVALID_OPTION, millrace_client_connect(address, options, &client, &error));
  OK(millrace_client_options_set_cache(options, 0, &error));
  OK(millrace_client_options_set_index(options, 1 << 20, &error));
  FAILS(MILLRACE_INVALID_OPTION, millrace_client_connect(address, options, &client, &error));
  millrace_client_options_free(options);
}

static void servers(const char *address, const char *nobody, const char *stranger) {
  millrace_client *client = (millrace_client *)1;
  FAILS(MILLRACE_UNREACHABLE, millrace_client_connect(nobody, NULL, &client, &error));
  CHECK(client == NULL);
  FAILS(MILLRACE_PROTOCOL, millrace_client_connect(stranger, NULL, &client, &error));
  FAILS(MILLRACE_DENIED, millrace_client_connect(address, NULL, &client, &error));
  millrace_client_options *options = millrace_client_options_new();
  OK(millrace_client_options_set_password(options, "guess", &error));
  millrace_error *error = NULL;
  CHECK(millrace_client_connect(address, options, &client, &error) == MILLRACE_DENIED);
  CHECK(strstr(millrace_error_message(error), address) != NULL);
  CHECK(strstr(millrace_error_message(error), "guess") == NULL);
  millrace_error_free(error);
  millrace_client_options_free(options);
}

static void arguments(const millrace_client *client) {
  const int bad = MILLRACE_INVALID_ARGUMENT;
  millrace_slice huge = millrace_bytes("", SIZE_MAX), hole = millrace_bytes(NULL, 5), k = str("k");
  millrace_slice two[2];
  millrace_value value, values[2];
  millrace_iter *iter = NULL;
  millrace_cache_stats stats;
  FAILS(bad, millrace_client_get(client, hole, &value, &error));
  FAILS(bad, millrace_client_get(client, k, NULL, &error));
  FAILS(bad, millrace_client_set(client, k, huge, &error));
  FAILS(bad, millrace_client_delete(client, hole, NULL, &error));
  FAILS(bad, millrace_client_set_with_ttl(client, k, huge, 1, &error));
  FAILS(bad, millrace_client_expire(client, hole, 1, NULL, &error));
  FAILS(bad, millrace_client_persist(client, hole, NULL, &error));
  FAILS(bad, millrace_client_ttl(client, k, NULL, &error));
  FAILS(MILLRACE_INVALID_OPTION, millrace_client_set_with_ttl(client, k, k, 0, &error));
  FAILS(MILLRACE_INVALID_OPTION, millrace_client_set_with_ttl(client, k, k, UINT64_MAX, &error));
  FAILS(MILLRACE_INVALID_OPTION, millrace_client_expire(client, k, 0, NULL, &error));
  FAILS(bad, millrace_client_multi_get(client, NULL, 2, values, &error));
  CHECK(values[0].data == NULL && values[1].data == NULL);
  two[0] = k;
  two[1] = hole;
  FAILS(bad, millrace_client_multi_get(client, two, 2, values, &error));
  FAILS(bad, millrace_client_multi_get(client, &k, SIZE_MAX, values, &error));
  FAILS(bad, millrace_client_range(client, k, k, 8, &iter, &error));
  FAILS(bad, millrace_client_prefix(client, k, MILLRACE_INCLUDE_END, &iter, &error));
  FAILS(bad, millrace_client_cache_stats(client, NULL, sizeof stats, &error));
  FAILS(bad, millrace_client_cache_stats(client, &stats, 0, &error));
  FAILS(bad, millrace_client_cache_stats(client, &stats, 9, &error));
  FAILS(bad, millrace_client_cache_stats(client, &stats, SIZE_MAX - 7, &error));
  FAILS(bad, millrace_client_write(client, NULL, &error));
  /* A code is enough. */
  CHECK(millrace_client_set(client, k, hole, NULL) == MILLRACE_INVALID_ARGUMENT);
}

/* A read is made again until its time is over, when it may be connecting. */
static int gives_up(int code) { return code == MILLRACE_UNREACHABLE || code == MILLRACE_TIMEOUT; }

/* A connection that is cut, or silent. */
static void faults(const char *bad_line) {
  for (size_t cache = 0; cache <= 1 << 20; cache += 1 << 20) {
    millrace_client *client = connect_to(bad_line, "secret", 400, cache);
    millrace_value value;
    millrace_slice name = str("cut");
    millrace_iter *iter = NULL;
    millrace_client_transaction *transaction = NULL;
    OK(millrace_client_set(client, str("k"), str("v"), &error));
    FAILS(MILLRACE_OUTCOME_UNKNOWN, millrace_client_set(client, str("cut"), str("v"), &error));
    FAILS(MILLRACE_OUTCOME_UNKNOWN, millrace_client_delete(client, str("cut"), NULL, &error));
    FAILS(MILLRACE_OUTCOME_UNKNOWN, millrace_client_expire(client, str("cut"), 60000, NULL, &error));
    int64_t ttl_ms = 0;
    CHECK(gives_up(millrace_client_ttl(client, str("cut"), &ttl_ms, NULL)) && ttl_ms == MILLRACE_NO_KEY);
    CHECK(gives_up(millrace_client_get(client, str("cut"), &value, NULL)) && value.data == NULL);
    CHECK(gives_up(millrace_client_multi_get(client, &name, 1, &value, NULL)));
    CHECK(value.data == NULL && holds(client, "k", "v"));
    FAILS(MILLRACE_OUTCOME_UNKNOWN, millrace_client_set(client, str("stall"), str("v"), &error));
    FAILS(MILLRACE_TIMEOUT, millrace_client_get(client, str("stall"), &value, &error));

    OK(millrace_client_range(client, str("cut"), str("d"), 0, &iter, &error));
    CHECK(!millrace_iter_next(iter, NULL, NULL));
    CHECK(gives_up(millrace_iter_status(iter, NULL)));
    millrace_iter_free(iter);

    OK(millrace_client_transaction_begin(client, &transaction, &error));
    OK(millrace_client_transaction_get(transaction, str("k"), &value, &error));
    CHECK(value_is(value, "v"));
    OK(millrace_client_transaction_set(transaction, str("k"), str("cut"), &error));
    FAILS(MILLRACE_OUTCOME_UNKNOWN, millrace_client_transaction_commit(transaction, &error));
    CHECK(holds(client, "k", "v"));
    OK(millrace_client_wait_coherent(client, &error));
    millrace_client_close(client);
  }
}

static void ignore(int number) { (void)number; }

/* Calls go on when a signal handler has run. */
static void signals(const char *address) {
  struct sigaction action;
  memset(&action, 0, sizeof action);
  action.sa_handler = ignore;
  CHECK(sigaction(SIGALRM, &action, NULL) == 0);
  struct itimerval often = {{0, 300}, {0, 300}}, never = {{0, 0}, {0, 0}};
  CHECK(setitimer(ITIMER_REAL, &often, NULL) == 0);
  for (int i = 0; i < 5; i++) {
    millrace_client *client = connect_to(address, "secret", 10000, i % 2 ? 1 << 20 : 0);
    for (int n = 0; n < 100; n++) {
      OK(millrace_client_set(client, str("signal"), str("v"), &error));
      CHECK(holds(client, "signal", "v"));
    }
    millrace_client_close(client);
  }
  CHECK(setitimer(ITIMER_REAL, &never, NULL) == 0);
}

/* A forked child gets errors, frees what it has, and the parent's connections stay as they are. */
static void forked(const char *address) {
  millrace_client *client = connect_to(address, "secret", 10000, 1 << 20);
  millrace_client_transaction *transaction = NULL;
  millrace_iter *iter = NULL;
  millrace_value value;
  OK(millrace_client_set(client, str("parent"), str("yes"), &error));
  CHECK(holds(client, "parent", "yes"));
  OK(millrace_client_range(client, str("parent"), str("q"), 0, &iter, &error));
  OK(millrace_client_transaction_begin(client, &transaction, &error));
  OK(millrace_client_transaction_get(transaction, str("parent"), &value, &error));
  CHECK(value_is(value, "yes"));
  millrace_cache_stats before, after;
  OK(millrace_client_cache_stats(client, &before, sizeof before, &error));
  pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    FAILS(MILLRACE_CLOSED, millrace_client_get(client, str("parent"), &value, &error));
    FAILS(MILLRACE_CLOSED, millrace_client_set(client, str("parent"), str("no"), &error));
    CHECK(!millrace_iter_next(iter, NULL, NULL));
    FAILS(MILLRACE_CLOSED, millrace_iter_status(iter, &error));
    FAILS(MILLRACE_CLOSED, millrace_client_transaction_get(transaction, str("x"), &value, &error));
    FAILS(MILLRACE_CLOSED, millrace_client_transaction_commit(transaction, &error));
    millrace_iter_free(iter);
    millrace_client_close(client);
    client = connect_to(address, "secret", 10000, 1 << 20);
    CHECK(holds(client, "parent", "yes"));
    millrace_client_close(client);
    _exit(0);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
  CHECK(holds(client, "parent", "yes"));
  OK(millrace_client_cache_stats(client, &after, sizeof after, &error));
  CHECK(after.hits == before.hits + 1 && after.clears == before.clears);
  CHECK(keys_are(iter, "parent"));
  OK(millrace_client_transaction_set(transaction, str("parent"), str("still"), &error));
  OK(millrace_client_transaction_commit(transaction, &error));
  CHECK(holds(client, "parent", "still"));
  millrace_client_close(client);
}

int main(int argc, char **argv) {
  CHECK(argc == 6);
  null();
  options(argv[2]);
  servers(argv[2], argv[4], argv[5]);
  millrace_client *client = connect_to(argv[2], "secret", 10000, 0);
  arguments(client);
  millrace_client_close(client);
  faults(argv[3]);
  signals(argv[2]);
  forked(argv[2]);
  return 0;
}

/* errors DIR: every mistake has its code and a text, and does no harm. */
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

static void codes(void) {
  const char *names[] = {"ok",       "no database", "locked",  "corruption", "unsupported", "io",
                         "full",     "memory",      "conflict", "expired",   "older",       "unknown family",
                         "invalid option", "closed", "panicked", "invalid argument", "busy", "other", "unreachable",
                         "timeout", "outcome unknown", "denied", "read only", "wrong type", "server busy",
                         "server", "protocol"};
  const int codes[] = {MILLRACE_OK,       MILLRACE_NO_DATABASE, MILLRACE_LOCKED,   MILLRACE_CORRUPTION,
                       MILLRACE_UNSUPPORTED, MILLRACE_IO,       MILLRACE_FULL,     MILLRACE_MEMORY,
                       MILLRACE_CONFLICT, MILLRACE_EXPIRED,     MILLRACE_OLDER,    MILLRACE_UNKNOWN_FAMILY,
                       MILLRACE_INVALID_OPTION, MILLRACE_CLOSED, MILLRACE_PANICKED, MILLRACE_INVALID_ARGUMENT,
                       MILLRACE_BUSY,     MILLRACE_OTHER,       MILLRACE_UNREACHABLE, MILLRACE_TIMEOUT,
                       MILLRACE_OUTCOME_UNKNOWN, MILLRACE_DENIED, MILLRACE_READ_ONLY, MILLRACE_WRONG_TYPE,
                       MILLRACE_SERVER_BUSY, MILLRACE_SERVER,   MILLRACE_PROTOCOL};
  for (int i = 0; i < 27; i++) CHECK(codes[i] == i && strcmp(millrace_code_name(codes[i]), names[i]) == 0);
  CHECK(strcmp(millrace_code_name(27), "unknown") == 0 && strcmp(millrace_code_name(-1), "unknown") == 0);
}

/* NULL is freed, counted and named; everything else refuses it. */
static void null(void) {
  millrace_close(NULL, NULL);
  millrace_options_free(NULL);
  millrace_family_free(NULL);
  millrace_names_free(NULL);
  millrace_batch_free(NULL);
  millrace_batch_clear(NULL);
  millrace_snapshot_free(NULL);
  millrace_iter_free(NULL);
  millrace_transaction_free(NULL);
  millrace_queue_free(NULL);
  millrace_value_free(NULL);
  millrace_completion_free(NULL);
  millrace_error_free(NULL);
  CHECK(millrace_error_code(NULL) == MILLRACE_OK && strlen(millrace_error_message(NULL)) > 0);
  CHECK(millrace_batch_count(NULL) == 0 && millrace_batch_bytes(NULL) == 0 && millrace_names_count(NULL) == 0);
  CHECK(millrace_names_get(NULL, 0) == NULL && millrace_queue_fd(NULL) == -1);
  CHECK(millrace_queue_take(NULL, NULL, 0) == 0 && !millrace_iter_next(NULL, NULL, NULL));

  const int bad = MILLRACE_INVALID_ARGUMENT;
  millrace_slice k = str("k");
  millrace_value v;
  millrace_db *db;
  millrace_family *family;
  millrace_names *names;
  millrace_snapshot *snapshot;
  millrace_iter *iter;
  millrace_transaction *transaction;
  FAILS(bad, millrace_open(NULL, NULL, &db, &error));
  FAILS(bad, millrace_open("/tmp", NULL, NULL, &error));
  FAILS(bad, millrace_options_set_memory(NULL, 1, &error));
  FAILS(bad, millrace_get(NULL, NULL, k, &v, &error));
  CHECK(v.data == NULL);
  FAILS(bad, millrace_multi_get(NULL, NULL, &k, 1, &v, &error));
  FAILS(bad, millrace_put(NULL, NULL, k, k, &error));
  FAILS(bad, millrace_delete(NULL, NULL, k, &error));
  FAILS(bad, millrace_delete_range(NULL, NULL, k, k, &error));
  FAILS(bad, millrace_merge(NULL, NULL, k, k, &error));
  FAILS(bad, millrace_write(NULL, NULL, &error));
  FAILS(bad, millrace_sync(NULL, &error));
  FAILS(bad, millrace_flush(NULL, &error));
  FAILS(bad, millrace_compact_range(NULL, NULL, k, k, &error));
  FAILS(bad, millrace_checkpoint(NULL, "x", &error));
  FAILS(bad, millrace_family_open(NULL, "x", &family, &error));
  FAILS(bad, millrace_family_create(NULL, "x", &family, &error));
  FAILS(bad, millrace_family_drop(NULL, "x", &error));
  FAILS(bad, millrace_family_list(NULL, &names, &error));
  FAILS(bad, millrace_batch_put(NULL, NULL, k, k, &error));
  FAILS(bad, millrace_batch_delete(NULL, NULL, k, &error));
  FAILS(bad, millrace_batch_delete_range(NULL, NULL, k, k, &error));
  FAILS(bad, millrace_batch_merge(NULL, NULL, k, k, &error));
  FAILS(bad, millrace_snapshot_new(NULL, &snapshot, &error));
  FAILS(bad, millrace_snapshot_get(NULL, NULL, k, &v, &error));
  FAILS(bad, millrace_snapshot_multi_get(NULL, NULL, &k, 1, &v, &error));
  FAILS(bad, millrace_range(NULL, NULL, NULL, k, k, 0, &iter, &error));
  CHECK(iter == NULL);
  FAILS(bad, millrace_prefix(NULL, NULL, NULL, k, 0, &iter, &error));
  FAILS(bad, millrace_iter_status(NULL, &error));
  FAILS(bad, millrace_transaction_begin(NULL, &transaction, &error));
  FAILS(bad, millrace_transaction_get(NULL, NULL, k, &v, &error));
  FAILS(bad, millrace_transaction_put(NULL, NULL, k, k, &error));
  FAILS(bad, millrace_transaction_delete(NULL, NULL, k, &error));
  FAILS(bad, millrace_transaction_commit(NULL, &error));
  FAILS(bad, millrace_queue_new(1, NULL, &error));
  FAILS(bad, millrace_get_async(NULL, NULL, NULL, k, 0, &error));
  FAILS(bad, millrace_put_async(NULL, NULL, NULL, k, k, 0, &error));
  FAILS(bad, millrace_delete_async(NULL, NULL, NULL, k, 0, &error));
  FAILS(bad, millrace_write_async(NULL, NULL, NULL, 0, &error));
  FAILS(bad, millrace_sync_async(NULL, NULL, 0, &error));
}

static void options(const char *data) {
  millrace_options *options = millrace_options_new();
  millrace_db *db = (millrace_db *)1;
  FAILS(MILLRACE_INVALID_ARGUMENT, millrace_options_set_durability(options, 7, &error));
  FAILS(MILLRACE_INVALID_ARGUMENT, millrace_options_set_compression(options, -1, &error));
  FAILS(MILLRACE_UNSUPPORTED, millrace_options_set_merge_operator(options, "mine", &error));
  FAILS(MILLRACE_INVALID_ARGUMENT, millrace_options_set_merge_operator(options, "\xff", &error));
  FAILS(MILLRACE_INVALID_ARGUMENT, millrace_options_set_rocksdb_option(options, "x", NULL, &error));
  OK(millrace_options_set_create(options, 0, &error));
  FAILS(MILLRACE_NO_DATABASE, millrace_open(data, options, &db, &error));
  CHECK(db == NULL);
  OK(millrace_options_set_cores(options, 0, &error));
  FAILS(MILLRACE_INVALID_OPTION, millrace_open(data, options, &db, &error));
  OK(millrace_options_set_cores(options, 1, &error));
  OK(millrace_options_set_memory(options, 1, &error));
  FAILS(MILLRACE_INVALID_OPTION, millrace_open(data, options, &db, &error));
  millrace_options_free(options);
}

static void calls(const millrace_db *db, const millrace_db *other) {
  millrace_value value, values[3];
  millrace_family *family = NULL, *foreign = NULL;
  millrace_iter *iter = NULL;
  millrace_snapshot *snapshot = NULL;
  millrace_slice none = millrace_unbounded(), huge = millrace_bytes("", SIZE_MAX), hole = millrace_bytes(NULL, 5);
  FAILS(MILLRACE_INVALID_ARGUMENT, millrace_get(db, NULL, hole, &value, &error));
  FAILS(MILLRACE_INVALID_ARGUMENT, millrace_put(db, NULL, str("k"), huge, &error));
  FAILS(MILLRACE_INVALID_ARGUMENT, millrace_multi_get(db, NULL, NULL, 3, values, &error));
  CHECK(values[0].data == NULL && values[2].data == NULL);
  FAILS(MILLRACE_UNSUPPORTED, millrace_delete_range(db, NULL, str("b"), str("a"), &error));
  FAILS(MILLRACE_UNSUPPORTED, millrace_merge(db, NULL, str("a"), str("b"), &error));
  FAILS(MILLRACE_UNKNOWN_FAMILY, millrace_family_open(db, "missing", &family, &error));
  CHECK(family == NULL);
  FAILS(MILLRACE_INVALID_ARGUMENT, millrace_family_open(db, "\xff", &family, &error));
  FAILS(MILLRACE_UNSUPPORTED, millrace_family_create(db, "default", &family, &error));
  FAILS(MILLRACE_UNSUPPORTED, millrace_family_drop(db, "default", &error));
  FAILS(MILLRACE_INVALID_ARGUMENT, millrace_range(db, NULL, NULL, none, none, 8, &iter, &error));
  FAILS(MILLRACE_INVALID_ARGUMENT, millrace_prefix(db, NULL, NULL, none, MILLRACE_INCLUDE_END, &iter, &error));

  /* Handles of another database. */
  OK(millrace_family_create(other, "foreign", &foreign, &error));
  OK(millrace_family_create(db, "own", &family, &error));
  OK(millrace_snapshot_new(other, &snapshot, &error));
  FAILS(MILLRACE_INVALID_ARGUMENT, millrace_put(db, foreign, str("k"), str("v"), &error));
  FAILS(MILLRACE_INVALID_ARGUMENT, millrace_range(db, NULL, snapshot, none, none, 0, &iter, &error));
  FAILS(MILLRACE_INVALID_ARGUMENT, millrace_snapshot_get(snapshot, family, str("k"), &value, &error));
  millrace_batch *batch = millrace_batch_new();
  OK(millrace_batch_put(batch, foreign, str("k"), str("v"), &error));
  FAILS(MILLRACE_INVALID_ARGUMENT, millrace_batch_put(batch, family, str("k"), str("v"), &error));
  FAILS(MILLRACE_INVALID_ARGUMENT, millrace_write(db, batch, &error));
  CHECK(millrace_batch_count(batch) == 1);
  OK(millrace_write(other, batch, &error));
  CHECK(has(other, foreign, "k", "v"));
  OK(millrace_batch_put(batch, family, str("k"), str("w"), &error));
  OK(millrace_write(db, batch, &error));
  CHECK(has(db, family, "k", "w"));
  millrace_batch_free(batch);
  millrace_snapshot_free(snapshot);
  millrace_family_free(foreign);
  millrace_family_free(family);
}

/* A forked child gets errors, and does not disturb its parent. */
static void forked(const char *data, millrace_db *db) {
  millrace_queue *queue = NULL;
  OK(millrace_queue_new(10, &queue, &error));
  OK(millrace_put_async(db, NULL, queue, str("parent"), str("yes"), 1, &error));
  pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    millrace_value value;
    millrace_db *again = NULL;
    FAILS(MILLRACE_CLOSED, millrace_get(db, NULL, str("k"), &value, &error));
    FAILS(MILLRACE_LOCKED, millrace_open(data, NULL, &again, &error));
    millrace_queue_free(queue);
    FAILS(MILLRACE_CLOSED, millrace_close(db, &error));
    _exit(0);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
  millrace_queue_free(queue);
  CHECK(has(db, NULL, "parent", "yes"));
}

int main(int argc, char **argv) {
  CHECK(argc == 2);
  char data[512], second[512];
  path_in(data, sizeof data, argv[1], "db");
  path_in(second, sizeof second, argv[1], "second");
  codes();
  null();
  options(data);
  millrace_db *db = NULL, *other = NULL;
  OK(millrace_open(data, NULL, &db, &error));
  FAILS(MILLRACE_LOCKED, millrace_open(data, NULL, &other, &error));
  OK(millrace_open(second, NULL, &other, &error));
  calls(db, other);
  FAILS(MILLRACE_UNSUPPORTED, millrace_checkpoint(db, second, &error));
  forked(data, db);
  OK(millrace_close(other, &error));
  OK(millrace_close(db, &error));
  return 0;
}

/* basics DIR: everything that blocking calls do, and that it is there after a reopening. */
#include "check.h"

static void keys_and_values(const millrace_db *db) {
  CHECK(has(db, NULL, "missing", NULL));
  OK(millrace_put(db, NULL, str("a"), str("1"), &error));
  OK(millrace_put(db, NULL, str("empty"), str(""), &error));
  OK(millrace_put(db, NULL, millrace_bytes("\0\xff", 2), millrace_bytes(NULL, 0), &error));
  CHECK(has(db, NULL, "a", "1"));
  CHECK(has(db, NULL, "empty", ""));

  millrace_slice keys[] = {str("a"), str("b"), millrace_bytes("\0\xff", 2)};
  millrace_value values[3];
  OK(millrace_multi_get(db, NULL, keys, 3, values, &error));
  CHECK(values[0].size == 1 && values[0].data[0] == '1');
  CHECK(values[1].data == NULL);
  CHECK(values[2].data != NULL && values[2].size == 0);
  millrace_values_free(values, 3);
  millrace_values_free(values, 3);
  millrace_values_free(NULL, 0);
  OK(millrace_multi_get(db, NULL, NULL, 0, NULL, &error));

  OK(millrace_delete(db, NULL, str("a"), &error));
  CHECK(has(db, NULL, "a", NULL));
  OK(millrace_delete_range(db, NULL, str(""), str("zzz"), &error));
  CHECK(has(db, NULL, "empty", NULL));

  uint64_t one = 1, sum = 0;
  millrace_value value;
  OK(millrace_merge(db, NULL, str("visits"), millrace_bytes(&one, 8), &error));
  OK(millrace_merge(db, NULL, str("visits"), millrace_bytes(&one, 8), &error));
  OK(millrace_get(db, NULL, str("visits"), &value, &error));
  CHECK(value.size == 8);
  memcpy(&sum, value.data, 8);
  CHECK(sum == 2);
  millrace_value_free(&value);
  OK(millrace_delete(db, NULL, str("visits"), &error));
  /* The error is not asked for. */
  CHECK(millrace_put(db, NULL, str("k"), str("v"), NULL) == MILLRACE_OK);
  CHECK(millrace_get(db, NULL, str("k"), NULL, NULL) == MILLRACE_INVALID_ARGUMENT);
  CHECK(millrace_delete(db, NULL, str("k"), NULL) == MILLRACE_OK);
}

static void batches(const millrace_db *db, const millrace_family *users) {
  uint64_t one = 1;
  millrace_batch *batch = millrace_batch_new();
  OK(millrace_batch_put(batch, NULL, str("x"), str("dropped"), &error));
  CHECK(millrace_batch_count(batch) == 1);
  millrace_batch_clear(batch);
  CHECK(millrace_batch_count(batch) == 0);
  OK(millrace_batch_put(batch, NULL, str("a"), str("1"), &error));
  OK(millrace_batch_put(batch, NULL, str("b"), str("2"), &error));
  OK(millrace_batch_put(batch, users, str("1"), str("Ada"), &error));
  OK(millrace_batch_put(batch, users, str("2"), str("Brian"), &error));
  OK(millrace_batch_put(batch, users, str("3"), str("Carla"), &error));
  OK(millrace_batch_delete(batch, NULL, str("b"), &error));
  OK(millrace_batch_delete(batch, users, str("1"), &error));
  OK(millrace_batch_delete_range(batch, NULL, str("m"), str("n"), &error));
  OK(millrace_batch_delete_range(batch, users, str("2"), str("3"), &error));
  OK(millrace_batch_merge(batch, NULL, str("c"), millrace_bytes(&one, 8), &error));
  CHECK(millrace_batch_count(batch) == 10 && millrace_batch_bytes(batch) > 30);
  OK(millrace_write(db, batch, &error));
  CHECK(millrace_batch_count(batch) == 0);
  CHECK(has(db, NULL, "x", NULL) && has(db, NULL, "a", "1") && has(db, NULL, "b", NULL));
  CHECK(has(db, users, "1", NULL) && has(db, users, "2", NULL) && has(db, users, "3", "Carla"));
  /* Users have no merge operator. The batch is empty after the error, and can be used again. */
  OK(millrace_batch_merge(batch, users, str("c"), str("1"), &error));
  FAILS(MILLRACE_UNSUPPORTED, millrace_write(db, batch, &error));
  CHECK(millrace_batch_count(batch) == 0);
  OK(millrace_batch_delete(batch, NULL, str("c"), &error));
  OK(millrace_write(db, batch, &error));
  millrace_batch_free(batch);
}

static void families(const millrace_db *db) {
  millrace_family *users = NULL, *same = NULL;
  OK(millrace_family_create(db, "users", &users, &error));
  CHECK(strcmp(millrace_family_name(users), "users") == 0);
  CHECK(strcmp(millrace_family_name(NULL), "default") == 0);
  batches(db, users);
  OK(millrace_family_open(db, "users", &same, &error));
  OK(millrace_put(db, same, str("4"), str("Dora"), &error));
  CHECK(has(db, users, "4", "Dora") && has(db, NULL, "4", NULL));
  OK(millrace_delete(db, users, str("3"), &error));
  FAILS(MILLRACE_UNSUPPORTED, millrace_merge(db, users, str("3"), str("x"), &error));

  millrace_names *names = NULL;
  OK(millrace_family_list(db, &names, &error));
  CHECK(millrace_names_count(names) == 2);
  CHECK(strcmp(millrace_names_get(names, 0), "default") == 0);
  CHECK(strcmp(millrace_names_get(names, 1), "users") == 0);
  CHECK(millrace_names_get(names, 2) == NULL);
  millrace_names_free(names);

  millrace_family *gone = NULL;
  OK(millrace_family_create(db, "gone", &gone, &error));
  OK(millrace_family_drop(db, "gone", &error));
  FAILS(MILLRACE_UNKNOWN_FAMILY, millrace_put(db, gone, str("k"), str("v"), &error));
  millrace_family_free(gone);
  OK(millrace_compact_range(db, users, str("0"), str("9"), &error));
  OK(millrace_delete_range(db, users, str("0"), str("9"), &error));
  CHECK(has(db, users, "4", NULL));
  millrace_family_free(same);
  millrace_family_free(users);
}

static void ranges(const millrace_db *db) {
  millrace_iter *iter = NULL;
  millrace_slice none = millrace_unbounded(), key, value;
  const char *all[] = {"a", "b", "c", "d"};
  for (int i = 0; i < 4; i++) OK(millrace_put(db, NULL, str(all[i]), str(all[i]), &error));
  OK(millrace_range(db, NULL, NULL, none, none, 0, &iter, &error));
  CHECK(keys_are(iter, "abcd"));
  OK(millrace_range(db, NULL, NULL, none, none, MILLRACE_REVERSE, &iter, &error));
  CHECK(keys_are(iter, "dcba"));
  OK(millrace_range(db, NULL, NULL, str("b"), str("d"), 0, &iter, &error));
  CHECK(keys_are(iter, "bc"));
  OK(millrace_range(db, NULL, NULL, str("b"), str("d"), MILLRACE_EXCLUDE_START | MILLRACE_INCLUDE_END, &iter, &error));
  CHECK(keys_are(iter, "cd"));
  OK(millrace_range(db, NULL, NULL, str("b"), none, MILLRACE_REVERSE | MILLRACE_INCLUDE_END, &iter, &error));
  CHECK(keys_are(iter, "dcb"));
  OK(millrace_prefix(db, NULL, NULL, str("c"), 0, &iter, &error));
  CHECK(millrace_iter_next(iter, &key, &value) && is(key, "c") && is(value, "c"));
  CHECK(!millrace_iter_next(iter, &key, &value) && key.data == NULL && value.data == NULL);
  millrace_iter_free(iter);
  OK(millrace_prefix(db, NULL, NULL, str(""), MILLRACE_REVERSE, &iter, &error));
  CHECK(keys_are(iter, "dcba"));

  millrace_snapshot *before = NULL;
  OK(millrace_snapshot_new(db, &before, &error));
  OK(millrace_delete_range(db, NULL, str("b"), str("z"), &error));
  OK(millrace_put(db, NULL, str("a"), str("new"), &error));
  millrace_value found;
  OK(millrace_snapshot_get(before, NULL, str("a"), &found, &error));
  CHECK(value_is(found, "a"));
  millrace_slice asked[] = {str("d"), str("e")};
  millrace_value values[2];
  OK(millrace_snapshot_multi_get(before, NULL, asked, 2, values, &error));
  CHECK(is(millrace_bytes(values[0].data, values[0].size), "d") && values[1].data == NULL);
  millrace_values_free(values, 2);
  OK(millrace_range(db, NULL, before, none, none, 0, &iter, &error));
  CHECK(keys_are(iter, "abcd"));
  OK(millrace_prefix(db, NULL, before, str("b"), 0, &iter, &error));
  millrace_family *users = NULL;
  OK(millrace_family_open(db, "users", &users, &error));
  OK(millrace_put(db, users, str("k"), str("v"), &error));
  OK(millrace_snapshot_get(before, users, str("k"), &found, &error));
  CHECK(value_is(found, NULL));
  OK(millrace_snapshot_multi_get(before, users, asked, 2, values, &error));
  CHECK(values[0].data == NULL && values[1].data == NULL);
  millrace_snapshot_free(before);
  /* It keeps the snapshot. */
  CHECK(keys_are(iter, "b"));
  OK(millrace_range(db, users, NULL, none, none, 0, &iter, &error));
  CHECK(keys_are(iter, "k"));
  millrace_family_free(users);

  /* Entries of several chunks. */
  char text[16];
  millrace_batch *batch = millrace_batch_new();
  for (int i = 0; i < 20000; i++) {
    snprintf(text, sizeof text, "n%06d", i);
    OK(millrace_batch_put(batch, NULL, str(text), str(text), &error));
  }
  OK(millrace_write(db, batch, &error));
  millrace_batch_free(batch);
  OK(millrace_prefix(db, NULL, NULL, str("n"), 0, &iter, &error));
  int count = 0;
  for (; millrace_iter_next(iter, &key, &value); count++) {
    snprintf(text, sizeof text, "n%06d", count);
    CHECK(is(key, text) && is(value, text));
  }
  CHECK(count == 20000 && millrace_iter_status(iter, NULL) == MILLRACE_OK);
  millrace_iter_free(iter);
  OK(millrace_delete_range(db, NULL, str("n"), str("o"), &error));
}

static void transactions(const millrace_db *db) {
  millrace_transaction *first = NULL, *second = NULL;
  millrace_family *users = NULL;
  millrace_value value;
  OK(millrace_family_open(db, "users", &users, &error));
  OK(millrace_put(db, NULL, str("t"), str("1"), &error));
  OK(millrace_transaction_begin(db, &first, &error));
  OK(millrace_transaction_begin(db, &second, &error));
  OK(millrace_transaction_get(first, NULL, str("t"), &value, &error));
  CHECK(value_is(value, "1"));
  OK(millrace_transaction_get(second, NULL, str("t"), &value, &error));
  CHECK(value_is(value, "1"));
  OK(millrace_transaction_get(first, users, str("nobody"), &value, &error));
  CHECK(value_is(value, NULL));
  OK(millrace_transaction_put(first, NULL, str("t"), str("2"), &error));
  OK(millrace_transaction_put(first, users, str("u"), str("Eve"), &error));
  OK(millrace_transaction_delete(first, users, str("k"), &error));
  OK(millrace_transaction_get(first, NULL, str("t"), &value, &error));
  CHECK(value_is(value, "2"));
  OK(millrace_transaction_put(second, NULL, str("t"), str("3"), &error));
  CHECK(has(db, NULL, "t", "1"));
  OK(millrace_transaction_commit(first, &error));
  FAILS(MILLRACE_CONFLICT, millrace_transaction_commit(second, &error));
  CHECK(has(db, NULL, "t", "2") && has(db, users, "u", "Eve") && has(db, users, "k", NULL));
  OK(millrace_transaction_begin(db, &first, &error));
  OK(millrace_transaction_delete(first, NULL, str("t"), &error));
  millrace_transaction_free(first);
  CHECK(has(db, NULL, "t", "2"));
  OK(millrace_delete(db, NULL, str("t"), &error));
  millrace_family_free(users);
}

int main(int argc, char **argv) {
  CHECK(argc == 2);
  char data[512], copy[512];
  path_in(data, sizeof data, argv[1], "db");
  path_in(copy, sizeof copy, argv[1], "copy");
  CHECK(strlen(millrace_version()) >= 5);

  millrace_options *options = millrace_options_new();
  size_t first_processor = 0;
  OK(millrace_options_set_processors(options, &first_processor, 1, &error));
  OK(millrace_options_set_cores(options, 2, &error));
  OK(millrace_options_set_memory(options, 64 << 20, &error));
  OK(millrace_options_set_durability(options, MILLRACE_DURABILITY_PROCESS, &error));
  OK(millrace_options_set_create(options, 1, &error));
  OK(millrace_options_set_adopt(options, 0, &error));
  OK(millrace_options_set_compression(options, MILLRACE_COMPRESSION_LZ4, &error));
  OK(millrace_options_set_merge_operator(options, "uint64add", &error));
  OK(millrace_options_set_blob_min(options, 4096, &error));
  OK(millrace_options_set_verify_checksums(options, 1, &error));
  OK(millrace_options_set_rocksdb_option(options, "target_file_size_base", "4194304", &error));

  millrace_db *db = NULL;
  OK(millrace_open(data, options, &db, &error));
  keys_and_values(db);
  families(db);
  ranges(db);
  transactions(db);
  OK(millrace_sync(db, &error));
  OK(millrace_flush(db, &error));
  OK(millrace_compact_range(db, NULL, millrace_unbounded(), millrace_unbounded(), &error));
  OK(millrace_checkpoint(db, copy, &error));
  OK(millrace_put(db, NULL, str("last"), str("one"), &error));

  /* What outlives the handle says that the database is closed. */
  millrace_family *users = NULL;
  millrace_snapshot *snapshot = NULL;
  millrace_iter *iter = NULL;
  millrace_transaction *transaction = NULL;
  millrace_value value;
  OK(millrace_family_open(db, "users", &users, &error));
  OK(millrace_snapshot_new(db, &snapshot, &error));
  OK(millrace_range(db, users, NULL, millrace_unbounded(), millrace_unbounded(), 0, &iter, &error));
  OK(millrace_transaction_begin(db, &transaction, &error));
  OK(millrace_close(db, &error));
  FAILS(MILLRACE_CLOSED, millrace_snapshot_get(snapshot, users, str("k"), &value, &error));
  CHECK(value.data == NULL);
  CHECK(!millrace_iter_next(iter, NULL, NULL));
  FAILS(MILLRACE_CLOSED, millrace_iter_status(iter, &error));
  FAILS(MILLRACE_CLOSED, millrace_iter_status(iter, &error));
  FAILS(MILLRACE_CLOSED, millrace_transaction_get(transaction, NULL, str("k"), &value, &error));
  millrace_transaction_free(transaction);
  millrace_iter_free(iter);
  millrace_snapshot_free(snapshot);
  millrace_family_free(users);

  /* Both are there, and open at the same time. */
  millrace_db *second = NULL;
  OK(millrace_open(data, options, &db, &error));
  OK(millrace_open(copy, NULL, &second, &error));
  CHECK(has(db, NULL, "a", "new") && has(db, NULL, "last", "one"));
  CHECK(has(second, NULL, "a", "new") && has(second, NULL, "last", NULL));
  OK(millrace_family_open(second, "users", &users, &error));
  CHECK(has(second, users, "u", "Eve"));
  millrace_family_free(users);
  OK(millrace_close(second, &error));
  OK(millrace_close(db, &error));
  millrace_options_free(options);
  return 0;
}

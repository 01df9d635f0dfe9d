/* queue DIR: asynchronous calls and poll(2). */
#include <poll.h>

#include "check.h"

#define ROUNDS 5000
#define AT_ONCE 300

static int readable(const millrace_queue *queue, int timeout) {
  struct pollfd fd = {.fd = millrace_queue_fd(queue), .events = POLLIN};
  return poll(&fd, 1, timeout) == 1;
}

/* The next completion. */
static millrace_completion next(const millrace_queue *queue) {
  millrace_completion done;
  while (millrace_queue_take(queue, &done, 1) == 0) CHECK(readable(queue, 30000));
  return done;
}

static void expect(const millrace_queue *queue, uint64_t tag, const char *value) {
  millrace_completion done = next(queue);
  CHECK(done.tag == tag && done.code == MILLRACE_OK && done.error == NULL);
  CHECK(value == NULL ? done.value.data == NULL : is(millrace_bytes(done.value.data, done.value.size), value));
  millrace_completion_free(&done);
  CHECK(done.value.data == NULL);
  millrace_completion_free(&done);
}

static void one_of_each(const millrace_db *db, const millrace_family *family) {
  millrace_queue *queue = NULL;
  millrace_batch *batch = millrace_batch_new();
  OK(millrace_queue_new(2, &queue, &error));
  CHECK(millrace_queue_fd(queue) >= 0 && !readable(queue, 0));
  OK(millrace_put_async(db, family, queue, str("k"), str("v"), 1, &error));
  expect(queue, 1, NULL);
  OK(millrace_get_async(db, family, queue, str("k"), UINT64_MAX, &error));
  expect(queue, UINT64_MAX, "v");
  OK(millrace_get_async(db, family, queue, str("missing"), 3, &error));
  expect(queue, 3, NULL);
  OK(millrace_delete_async(db, family, queue, str("k"), 4, &error));
  expect(queue, 4, NULL);
  OK(millrace_batch_put(batch, family, str("k"), str("w"), &error));
  OK(millrace_write_async(db, queue, batch, 5, &error));
  CHECK(millrace_batch_count(batch) == 0);
  expect(queue, 5, NULL);
  OK(millrace_sync_async(db, queue, 6, &error));
  expect(queue, 6, NULL);
  CHECK(has(db, family, "k", "w"));
  CHECK(!readable(queue, 0));

  /* No room: nothing begins, and the batch keeps its writes. */
  OK(millrace_get_async(db, NULL, queue, str("k"), 7, &error));
  OK(millrace_get_async(db, NULL, queue, str("k"), 8, &error));
  OK(millrace_batch_put(batch, family, str("k"), str("x"), &error));
  FAILS(MILLRACE_BUSY, millrace_get_async(db, NULL, queue, str("k"), 9, &error));
  FAILS(MILLRACE_BUSY, millrace_write_async(db, queue, batch, 9, &error));
  CHECK(millrace_batch_count(batch) == 1);
  millrace_completion done = next(queue);
  millrace_completion_free(&done);
  OK(millrace_write_async(db, queue, batch, 10, &error));
  for (int left = 2; left > 0; left--) {
    done = next(queue);
    CHECK(done.code == MILLRACE_OK && done.tag >= 7 && done.tag <= 10);
    millrace_completion_free(&done);
  }
  CHECK(has(db, family, "k", "x"));

  /* An operation that fails. */
  OK(millrace_batch_merge(batch, NULL, str("k"), str("x"), &error));
  OK(millrace_write_async(db, queue, batch, 11, &error));
  done = next(queue);
  CHECK(done.tag == 11 && done.code == MILLRACE_UNSUPPORTED && done.value.data == NULL);
  CHECK(millrace_error_code(done.error) == MILLRACE_UNSUPPORTED);
  CHECK(strlen(millrace_error_message(done.error)) > 0);
  millrace_completion_free(&done);
  CHECK(done.error == NULL);
  millrace_batch_free(batch);
  millrace_queue_free(queue);
  FAILS(MILLRACE_INVALID_ARGUMENT, millrace_queue_new(0, &queue, &error));
}

/* Many operations at a time, more than a core takes (1,024): writes, then reads of what they wrote. */
static void many(const millrace_db *db) {
  millrace_queue *queue = NULL;
  OK(millrace_queue_new(ROUNDS, &queue, &error));
  static unsigned char seen[ROUNDS];
  for (int write = 1; write >= 0; write--) {
    memset(seen, 0, sizeof seen);
    for (int i = 0; i < ROUNDS; i++) {
      char text[32];
      snprintf(text, sizeof text, "many%d", i);
      if (write) {
        OK(millrace_put_async(db, NULL, queue, str(text), str(text), (uint64_t)i, &error));
      } else {
        OK(millrace_get_async(db, NULL, queue, str(text), (uint64_t)i, &error));
      }
    }
    FAILS(MILLRACE_BUSY, millrace_get_async(db, NULL, queue, str("k"), 0, &error));
    for (int left = ROUNDS; left > 0;) {
      millrace_completion done[7];
      size_t count = millrace_queue_take(queue, done, 7);
      if (count == 0) CHECK(readable(queue, 30000));
      for (size_t i = 0; i < count; i++, left--) {
        char text[32];
        snprintf(text, sizeof text, "many%d", (int)done[i].tag);
        CHECK(done[i].code == MILLRACE_OK && done[i].tag < ROUNDS && !seen[done[i].tag]++);
        CHECK(write || is(millrace_bytes(done[i].value.data, done[i].value.size), text));
        millrace_completion_free(&done[i]);
      }
    }
    millrace_completion done;
    CHECK(millrace_queue_take(queue, &done, 1) == 0 && !readable(queue, 0));
  }
  millrace_queue_free(queue);
}

/* What is left after a take keeps the descriptor readable. */
static void leftovers(const millrace_db *db) {
  millrace_queue *queue = NULL;
  OK(millrace_queue_new(AT_ONCE, &queue, &error));
  for (int i = 0; i < AT_ONCE; i++) OK(millrace_get_async(db, NULL, queue, str("many1"), (uint64_t)i, &error));
  /* All are answered before those that come now on the one core, so that none comes during the takes. */
  for (int i = 0; i < AT_ONCE; i++) CHECK(has(db, NULL, "many2", "many2"));
  for (int i = 0; i < AT_ONCE; i++) {
    CHECK(readable(queue, 30000));
    millrace_completion done;
    CHECK(millrace_queue_take(queue, &done, 1) == 1);
    millrace_completion_free(&done);
  }
  CHECK(!readable(queue, 0));
  millrace_queue_free(queue);
}

int main(int argc, char **argv) {
  CHECK(argc == 2);
  char data[512];
  path_in(data, sizeof data, argv[1], "db");
  millrace_db *db = NULL;
  millrace_family *family = NULL;
  millrace_queue *queue = NULL;
  OK(millrace_open(data, NULL, &db, &error));
  OK(millrace_family_create(db, "family", &family, &error));
  one_of_each(db, NULL);
  one_of_each(db, family);
  many(db);
  leftovers(db);

  /* A queue that is freed has done its writes. */
  OK(millrace_queue_new(AT_ONCE, &queue, &error));
  for (int i = 0; i < AT_ONCE / 2; i++) {
    char text[32];
    snprintf(text, sizeof text, "freed%d", i);
    OK(millrace_put_async(db, NULL, queue, str(text), str("v"), 0, &error));
    OK(millrace_get_async(db, NULL, queue, str(text), 0, &error));
  }
  millrace_queue_free(queue);
  for (int i = 0; i < AT_ONCE / 2; i++) {
    char text[32];
    snprintf(text, sizeof text, "freed%d", i);
    CHECK(has(db, NULL, text, "v"));
  }

  /* Every operation ends if the database is closed meanwhile: it was done, or did not begin. */
  OK(millrace_queue_new(ROUNDS, &queue, &error));
  for (int i = 0; i < ROUNDS; i++) {
    char text[32];
    snprintf(text, sizeof text, "closed%d", i);
    OK(millrace_put_async(db, NULL, queue, str(text), str("v"), (uint64_t)i, &error));
  }
  OK(millrace_close(db, &error));
  static unsigned char written[ROUNDS];
  int count = 0;
  for (int i = 0; i < ROUNDS; i++) {
    millrace_completion done = next(queue);
    CHECK(done.code == MILLRACE_OK || done.code == MILLRACE_CLOSED);
    written[done.tag] = done.code == MILLRACE_OK;
    count += written[done.tag];
    millrace_completion_free(&done);
  }
  CHECK(count > 0);
  millrace_queue_free(queue);
  millrace_family_free(family);

  OK(millrace_open(data, NULL, &db, &error));
  for (int i = 0; i < ROUNDS; i++) {
    char text[32];
    snprintf(text, sizeof text, "closed%d", i);
    CHECK(!written[i] || has(db, NULL, text, "v"));
  }
  OK(millrace_close(db, &error));
  return 0;
}

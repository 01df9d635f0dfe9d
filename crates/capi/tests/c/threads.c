/* threads DIR: one database and one queue for many threads, which submit and take at the same time. */
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>

#include "check.h"

#define THREADS 8
#define EACH 400

static millrace_db *db;
static millrace_family *family;
static millrace_snapshot *snapshot;
static millrace_queue *queue;
static atomic_int left = THREADS * EACH;
static atomic_uchar seen[THREADS * EACH];

static void name(char *text, size_t size, const char *what, int thread, int i) {
  snprintf(text, size, "%s-%d-%d", what, thread, i);
}

static void *blocking(void *argument) {
  int thread = *(int *)argument;
  millrace_batch *batch = millrace_batch_new();
  for (int i = 0; i < EACH; i++) {
    char key[64];
    millrace_value value;
    name(key, sizeof key, "b", thread, i);
    if (i % 2) {
      OK(millrace_put(db, family, str(key), str(key), &error));
    } else {
      OK(millrace_batch_put(batch, family, str(key), str(key), &error));
      OK(millrace_write(db, batch, &error));
    }
    CHECK(has(db, family, key, key));
    OK(millrace_snapshot_get(snapshot, family, str(key), &value, &error));
    CHECK(value_is(value, NULL));
  }
  millrace_batch_free(batch);
  return NULL;
}

/* Puts, and takes completions, which may be those of others, until all are taken. */
static void *asynchronous(void *argument) {
  int thread = *(int *)argument;
  int sent = 0;
  while (atomic_load(&left) > 0) {
    for (int burst = 0; burst < 20 && sent < EACH; burst++) {
      char key[64];
      name(key, sizeof key, "a", thread, sent);
      millrace_code code = millrace_put_async(db, family, queue, str(key), str(key),
                                              (uint64_t)(thread * EACH + sent), NULL);
      if (code == MILLRACE_BUSY) break;
      CHECK(code == MILLRACE_OK);
      sent++;
    }
    millrace_completion done[5];
    size_t count = millrace_queue_take(queue, done, 5);
    for (size_t i = 0; i < count; i++) {
      CHECK(done[i].code == MILLRACE_OK && atomic_fetch_add(&seen[done[i].tag], 1) == 0);
      atomic_fetch_sub(&left, 1);
      millrace_completion_free(&done[i]);
    }
    if (count == 0) {
      /* Another thread may take what this one waits for. */
      struct pollfd fd = {.fd = millrace_queue_fd(queue), .events = POLLIN};
      CHECK(poll(&fd, 1, 5) >= 0);
    }
  }
  return NULL;
}

int main(int argc, char **argv) {
  CHECK(argc == 2);
  char data[512];
  path_in(data, sizeof data, argv[1], "db");
  millrace_options *options = millrace_options_new();
  OK(millrace_options_set_cores(options, 2, &error));
  OK(millrace_options_set_durability(options, MILLRACE_DURABILITY_PROCESS, &error));
  OK(millrace_open(data, options, &db, &error));
  OK(millrace_family_create(db, "threads", &family, &error));
  OK(millrace_snapshot_new(db, &snapshot, &error));
  OK(millrace_queue_new(200, &queue, &error));
  pthread_t threads[2 * THREADS];
  int numbers[THREADS];
  for (int i = 0; i < THREADS; i++) {
    numbers[i] = i;
    CHECK(pthread_create(&threads[2 * i], NULL, blocking, &numbers[i]) == 0);
    CHECK(pthread_create(&threads[2 * i + 1], NULL, asynchronous, &numbers[i]) == 0);
  }
  for (int i = 0; i < 2 * THREADS; i++) CHECK(pthread_join(threads[i], NULL) == 0);
  CHECK(atomic_load(&left) == 0);
  for (int thread = 0; thread < THREADS; thread++) {
    for (int i = 0; i < EACH; i++) {
      char key[64];
      name(key, sizeof key, "a", thread, i);
      CHECK(has(db, family, key, key));
    }
  }
  millrace_queue_free(queue);
  millrace_snapshot_free(snapshot);
  millrace_family_free(family);
  OK(millrace_close(db, &error));
  millrace_options_free(options);
  return 0;
}

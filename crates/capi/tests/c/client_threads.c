/* client_threads DIR ADDRESS: threads share a client, with and without a cache. */
#include <pthread.h>

#include "check.h"

#define THREADS 8
#define EACH 200

static millrace_client *client;

static void *work(void *argument) {
  int thread = *(int *)argument;
  millrace_client_batch *batch = millrace_client_batch_new();
  millrace_value value;
  for (int i = 0; i < EACH; i++) {
    char key[64];
    bool existed = false;
    snprintf(key, sizeof key, "%d-%04d", thread, i);
    if (i % 2) {
      OK(millrace_client_set(client, str(key), str(key), &error));
    } else {
      OK(millrace_client_batch_set(batch, str(key), str(key), &error));
      OK(millrace_client_write(client, batch, &error));
    }
    OK(millrace_client_get(client, str(key), &value, &error));
    CHECK(value_is(value, key));
    /* A key that all threads write: some value of theirs. */
    OK(millrace_client_set(client, str("shared"), str(key), &error));
    OK(millrace_client_get(client, str("shared"), &value, &error));
    CHECK(value.data != NULL && value.size == strlen(key));
    millrace_value_free(&value);
    if (i % 10 == 9) {
      OK(millrace_client_delete(client, str(key), &existed, &error));
      CHECK(existed);
    }
  }
  millrace_client_batch_free(batch);
  char prefix[8];
  snprintf(prefix, sizeof prefix, "%d-", thread);
  millrace_iter *iter = NULL;
  int count = 0;
  OK(millrace_client_prefix(client, str(prefix), 0, &iter, &error));
  while (millrace_iter_next(iter, NULL, NULL)) count++;
  OK(millrace_iter_status(iter, &error));
  millrace_iter_free(iter);
  CHECK(count == EACH - EACH / 10);
  return NULL;
}

/* Each adds one to a counter as often as it takes. */
static void *count(void *argument) {
  (void)argument;
  for (int done = 0; done < 20;) {
    millrace_client_transaction *transaction = NULL;
    millrace_value value;
    char text[16] = "0";
    OK(millrace_client_transaction_begin(client, &transaction, &error));
    OK(millrace_client_transaction_get(transaction, str("counter"), &value, &error));
    CHECK(value.size < sizeof text);
    if (value.data != NULL) memcpy(text, value.data, value.size);
    snprintf(text, sizeof text, "%d", atoi(text) + 1);
    millrace_value_free(&value);
    OK(millrace_client_transaction_set(transaction, str("counter"), str(text), &error));
    int code = millrace_client_transaction_commit(transaction, NULL);
    CHECK(code == MILLRACE_OK || code == MILLRACE_CONFLICT);
    done += code == MILLRACE_OK;
  }
  return NULL;
}

static void all(void *(*what)(void *)) {
  pthread_t threads[THREADS];
  int numbers[THREADS];
  for (int i = 0; i < THREADS; i++) {
    numbers[i] = i;
    CHECK(pthread_create(&threads[i], NULL, what, &numbers[i]) == 0);
  }
  for (int i = 0; i < THREADS; i++) CHECK(pthread_join(threads[i], NULL) == 0);
}

int main(int argc, char **argv) {
  CHECK(argc == 3);
  for (size_t cache = 0; cache <= 8 << 20; cache += 8 << 20) {
    millrace_client_options *options = millrace_client_options_new();
    OK(millrace_client_options_set_password(options, "secret", &error));
    OK(millrace_client_options_set_timeout_ms(options, 30000, &error));
    OK(millrace_client_options_set_cache(options, cache, &error));
    OK(millrace_client_connect(argv[2], options, &client, &error));
    millrace_client_options_free(options);
    OK(millrace_client_delete_range(client, str(""), str("~"), NULL, &error));
    all(work);
    all(count);
    millrace_value value;
    OK(millrace_client_get(client, str("counter"), &value, &error));
    CHECK(value_is(value, "160"));
    millrace_client_close(client);
  }
  return 0;
}

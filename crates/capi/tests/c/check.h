/* What the test programs share: checks that say where they failed. */
#ifndef CHECK_H
#define CHECK_H

#include <millrace.h>
#include <stdio.h>
#include <stdlib.h>

#define CHECK(condition)                                                              \
  do {                                                                                \
    if (!(condition)) {                                                               \
      fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);         \
      exit(1);                                                                        \
    }                                                                                 \
  } while (0)

/* CALL has `&error` as its last argument. */
#define OK(call)                                                                      \
  do {                                                                                \
    millrace_error *error = NULL;                                                     \
    if ((call) != MILLRACE_OK) {                                                      \
      fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, millrace_error_message(error)); \
      exit(1);                                                                        \
    }                                                                                 \
    CHECK(error == NULL);                                                             \
  } while (0)

/* CALL has `&error` as its last argument, and must fail with CODE. */
#define FAILS(expected, call)                                                         \
  do {                                                                                \
    millrace_error *error = NULL;                                                     \
    int code = (call);                                                                \
    if (code != (expected)) {                                                         \
      fprintf(stderr, "%s:%d: %s, %s\n", __FILE__, __LINE__, millrace_code_name(code), \
              millrace_error_message(error));                                         \
      exit(1);                                                                        \
    }                                                                                 \
    CHECK(error != NULL && (int)millrace_error_code(error) == code);                  \
    CHECK(strlen(millrace_error_message(error)) > 0);                                 \
    millrace_error_free(error);                                                       \
  } while (0)

static inline millrace_slice str(const char *text) { return millrace_str(text); }

static inline int is(millrace_slice slice, const char *text) {
  return slice.data != NULL && slice.size == strlen(text) && memcmp(slice.data, text, slice.size) == 0;
}

/* Whether a value is this text (NULL: there is none). Frees it. */
static inline int value_is(millrace_value value, const char *text) {
  int same = text == NULL ? value.data == NULL : is(millrace_bytes(value.data, value.size), text);
  millrace_value_free(&value);
  CHECK(value.data == NULL && value.size == 0);
  millrace_value_free(&value);
  return same;
}

/* Whether a key has this value. */
static inline int has(const millrace_db *db, const millrace_family *family, const char *key, const char *text) {
  millrace_value value;
  OK(millrace_get(db, family, str(key), &value, &error));
  return value_is(value, text);
}

/* The keys of an iterator, one after the other. Frees it. */
static inline int keys_are(millrace_iter *iter, const char *expected) {
  char keys[256] = "";
  millrace_slice key;
  while (millrace_iter_next(iter, &key, NULL)) strncat(keys, key.data, key.size);
  CHECK(key.data == NULL);
  CHECK(!millrace_iter_next(iter, NULL, NULL));
  OK(millrace_iter_status(iter, &error));
  millrace_iter_free(iter);
  if (strcmp(keys, expected) != 0) fprintf(stderr, "keys: %s\n", keys);
  return strcmp(keys, expected) == 0;
}

static inline void path_in(char *path, size_t size, const char *dir, const char *name) {
  CHECK(snprintf(path, size, "%s/%s", dir, name) < (int)size);
}

#endif

/*
 * Millrace: an embedded key-value engine that reads and writes RocksDB databases, and a client of Millrace nodes.
 *
 * A database is a sorted map from keys to values, both byte strings, in a directory. An acknowledged write survives a
 * power cut. The engine runs in threads of its own; calls hand it their requests. A client does the same with a database
 * that a node serves on another machine: see "Clients" below.
 *
 * Results. A function that can fail returns a millrace_code, MILLRACE_OK (0) for success. Its last argument is where it
 * puts an error, or NULL where it succeeds; pass NULL if the code is enough. You free an error with
 * millrace_error_free(). Except where it says otherwise, a function that fails has done nothing.
 *
 * Ownership. What a function puts into a `millrace_x **`, or returns as `millrace_x *`, is yours: free it with the
 * function that is named there. All functions that free accept NULL. What you pass (keys, values, names) is copied or
 * used during the call only, so you may free it when the call returns, an asynchronous call as well.
 *
 * Threads. Databases, column families, snapshots, clients and completion queues may be used by several threads at the
 * same time. Options, batches, iterators and transactions may go from one thread to another, but are used by one at a time.
 * Nobody may use a handle while it is freed, or later.
 *
 * Order of frees. Any: column families, snapshots, iterators and transactions may outlive the handle of their database,
 * which is closed then, so that their functions return MILLRACE_CLOSED. Iterators and transactions of a client go on
 * without its handle.
 *
 * Processes. One at a time has a database open. After fork(), only the parent can use its handles: in the child all
 * calls return MILLRACE_CLOSED. The first millrace_open() makes the process ignore SIGXFSZ.
 *
 * Column families. Functions with an argument `family` are for the default one if it is NULL.
 */
#ifndef MILLRACE_H
#define MILLRACE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct millrace_db millrace_db;
typedef struct millrace_options millrace_options;
typedef struct millrace_family millrace_family;
typedef struct millrace_names millrace_names;
typedef struct millrace_batch millrace_batch;
typedef struct millrace_snapshot millrace_snapshot;
typedef struct millrace_iter millrace_iter;
typedef struct millrace_transaction millrace_transaction;
typedef struct millrace_queue millrace_queue;
typedef struct millrace_error millrace_error;
typedef struct millrace_client millrace_client;
typedef struct millrace_async_client millrace_async_client;
typedef struct millrace_async_range millrace_async_range;
typedef struct millrace_async_transaction millrace_async_transaction;
typedef struct millrace_client_options millrace_client_options;
typedef struct millrace_client_batch millrace_client_batch;
typedef struct millrace_client_transaction millrace_client_transaction;

/* The version of the library, such as "0.1.0". It is valid for ever. */
const char *millrace_version(void);

/* ---- Bytes ---------------------------------------------------------------------------------------------------- */

/* Bytes that belong to somebody else. NULL with size 0 is an empty key or value; as a bound of a range it is none. */
typedef struct millrace_slice {
  const char *data;
  size_t size;
} millrace_slice;

/* The bytes of a string, without the zero byte at its end. */
static inline millrace_slice millrace_str(const char *text) {
  millrace_slice slice;
  slice.data = text;
  slice.size = strlen(text);
  return slice;
}

/* So many bytes. */
static inline millrace_slice millrace_bytes(const void *data, size_t size) {
  millrace_slice slice;
  slice.data = (const char *)data;
  slice.size = size;
  return slice;
}

/* No bound. */
static inline millrace_slice millrace_unbounded(void) { return millrace_bytes(NULL, 0); }

/* A value that was found, which you free with millrace_value_free(). `data` is NULL if there is no such key; an empty
 * value has another address and size 0. No zero byte follows it. Do not change the fields. After an error there is no
 * value. */
typedef struct millrace_value {
  const char *data;
  size_t size;
  void *owner;
} millrace_value;

/* Frees a value, if there is one. There is none afterwards. */
void millrace_value_free(millrace_value *value);

/* Frees all values of an array, but not the array. */
void millrace_values_free(millrace_value *values, size_t count);

/* ---- Errors --------------------------------------------------------------------------------------------------- */

/* The numbers never change; newer versions may have more. */
typedef enum millrace_code {
  MILLRACE_OK = 0,
  /* There is no database in the directory, and the options do not allow to create one. */
  MILLRACE_NO_DATABASE = 1,
  /* The database is open already, in another process or in this one. */
  MILLRACE_LOCKED = 2,
  /* Bytes on the disk contradict the format or their checksum. */
  MILLRACE_CORRUPTION = 3,
  /* The database or the call asks for something that this engine, or the server, does not do. */
  MILLRACE_UNSUPPORTED = 4,
  /* The device or the system failed. A write is not visible, and may be there after the next opening. */
  MILLRACE_IO = 5,
  /* The disk is full, or cannot be written for now. A later attempt may succeed. */
  MILLRACE_FULL = 6,
  /* The operation needs more memory than the options allow. */
  MILLRACE_MEMORY = 7,
  /* A key that the transaction has read was written meanwhile: begin again. */
  MILLRACE_CONFLICT = 8,
  /* A snapshot was held longer than an hour, or too many are held. */
  MILLRACE_EXPIRED = 9,
  /* A RocksDB older than 7.8 wrote the database last: see millrace_options_set_adopt(). */
  MILLRACE_OLDER = 10,
  /* No column family has this name, or it was dropped. */
  MILLRACE_UNKNOWN_FAMILY = 11,
  /* An option is impossible. */
  MILLRACE_INVALID_OPTION = 12,
  /* The database was closed, or the database or the client belongs to the parent of this forked process. */
  MILLRACE_CLOSED = 13,
  /* A bug: a thread of the database, or the call, has panicked. If calls go on failing, close and open again. */
  MILLRACE_PANICKED = 14,
  /* An argument is NULL and must not be, belongs to another database, or makes no sense. */
  MILLRACE_INVALID_ARGUMENT = 15,
  /* The completion queue has as many operations as it may: take completions first. */
  MILLRACE_BUSY = 16,
  /* An error that has no number yet. */
  MILLRACE_OTHER = 17,
  /* No connection could be made, or it broke. Nothing was changed: the call reads, or nothing of it was sent. */
  MILLRACE_UNREACHABLE = 18,
  /* The server's answer did not come in time. Nothing was changed: the call reads, or nothing of it was sent. */
  MILLRACE_TIMEOUT = 19,
  /* The connection broke, or the time was over, after a part of a write was sent. It was made, or was not, or still will
   * be: read the key before you write it again. */
  MILLRACE_OUTCOME_UNKNOWN = 20,
  /* The password is wrong or missing, the user may not do this, or the server's certificate is not trusted. */
  MILLRACE_DENIED = 21,
  /* The server only reads. */
  MILLRACE_READ_ONLY = 22,
  /* The key holds something that is not a string. */
  MILLRACE_WRONG_TYPE = 23,
  /* The server is starting, has too many clients, or is otherwise busy. Try again later. */
  MILLRACE_SERVER_BUSY = 24,
  /* Another error that the server answered. */
  MILLRACE_SERVER = 25,
  /* The peer does not speak the Redis protocol, or a reply exceeds the limits. */
  MILLRACE_PROTOCOL = 26
} millrace_code;

/* The name of a code, such as "locked"; "unknown" for other numbers. It is valid for ever. */
const char *millrace_code_name(int code);

/* The code of an error; MILLRACE_OK for NULL. */
millrace_code millrace_error_code(const millrace_error *error);

/* What failed and why, for people. It is valid until the error is freed. */
const char *millrace_error_message(const millrace_error *error);

/* Frees an error. */
void millrace_error_free(millrace_error *error);

/* ---- Options -------------------------------------------------------------------------------------------------- */

/* Makes the default options, which you free with millrace_options_free(). They can be used for several databases. */
millrace_options *millrace_options_new(void);

/* Frees options. Databases that were opened with them keep what they need. */
void millrace_options_free(millrace_options *options);

/* The number of threads that run the database; 1 by default. One serves several hundred readers, and all writers. */
millrace_code millrace_options_set_cores(millrace_options *options, size_t cores, millrace_error **error);

/* Runs one thread on each of these processors, pinned to it. By default the system decides. */
millrace_code millrace_options_set_processors(millrace_options *options, const size_t *processors, size_t count,
                                              millrace_error **error);

/* Memory for everything that the database holds, in bytes; 256 MiB by default, at least 16 MiB for each core. Values,
 * batches and queues that you hold are not in it. */
millrace_code millrace_options_set_memory(millrace_options *options, uint64_t bytes, millrace_error **error);

/* What an acknowledged write survives: a power cut (the default), or only the end of the process. */
enum { MILLRACE_DURABILITY_POWER = 0, MILLRACE_DURABILITY_PROCESS = 1 };
millrace_code millrace_options_set_durability(millrace_options *options, int durability, millrace_error **error);

/* Whether to create a database, with its directory, if there is none; on by default. */
millrace_code millrace_options_set_create(millrace_options *options, int create, millrace_error **error);

/* Whether to take over a database that a RocksDB older than 7.8 wrote last, which cannot read it afterwards; off by
 * default. */
millrace_code millrace_options_set_adopt(millrace_options *options, int adopt, millrace_error **error);

/* How blocks of new tables are compressed, if the directory's options do not say; not, by default. */
enum {
  MILLRACE_COMPRESSION_NONE = 0,
  MILLRACE_COMPRESSION_SNAPPY = 1,
  MILLRACE_COMPRESSION_ZLIB = 2,
  MILLRACE_COMPRESSION_BZIP2 = 3,
  MILLRACE_COMPRESSION_LZ4 = 4,
  MILLRACE_COMPRESSION_ZSTD = 5
};
millrace_code millrace_options_set_compression(millrace_options *options, int compression, millrace_error **error);

/* The operator of millrace_merge() for the default column family, by its name in RocksDB: "uint64add", "stringappend",
 * "stringappendtest", "put", "max" or "bytesxor". A new database records it; another one than a database has is refused
 * when it is opened. */
millrace_code millrace_options_set_merge_operator(millrace_options *options, const char *name, millrace_error **error);

/* Store values of at least so many bytes in blob files, which merges do not copy. By default only databases whose
 * options ask for it do so. */
millrace_code millrace_options_set_blob_min(millrace_options *options, size_t bytes, millrace_error **error);

/* Whether to check the checksum of every block that is read; on by default. */
millrace_code millrace_options_set_verify_checksums(millrace_options *options, int verify, millrace_error **error);

/* One of RocksDB's options of the default column family by its name, such as "target_file_size_base", for a database
 * that is created. An existing one keeps its own. */
millrace_code millrace_options_set_rocksdb_option(millrace_options *options, const char *name, const char *value,
                                                  millrace_error **error);

/* ---- Databases ------------------------------------------------------------------------------------------------ */

/* Opens the database in a directory. Both are created if they do not exist, unless the options say otherwise.
 * `options` may be NULL for the defaults. You free *db with millrace_close(). */
millrace_code millrace_open(const char *path, const millrace_options *options, millrace_db **db,
                            millrace_error **error);

/* Closes a database: what was sent before is done, then its threads end and its lock is released. Waits for that, and
 * frees the handle. It may return the error that ended all writing earlier; the database is closed all the same. */
millrace_code millrace_close(millrace_db *db, millrace_error **error);

/* Looks up a key. You free *value with millrace_value_free(). That there is no such key is no error: value->data is
 * NULL then. */
millrace_code millrace_get(const millrace_db *db, const millrace_family *family, millrace_slice key,
                           millrace_value *value, millrace_error **error);

/* Looks up many keys, and reads all blocks that are not in memory at the same time. values[i] is the value of keys[i];
 * you free all `count` of them, for example with millrace_values_free(). After an error there are none. Each may be of
 * another moment: see millrace_snapshot_multi_get(). */
millrace_code millrace_multi_get(const millrace_db *db, const millrace_family *family, const millrace_slice *keys,
                                 size_t count, millrace_value *values, millrace_error **error);

/* Sets a key. As all writes, it returns when the write is visible to everybody and as durable as the options say. Writes
 * of several threads share the flushes of the log. */
millrace_code millrace_put(const millrace_db *db, const millrace_family *family, millrace_slice key,
                           millrace_slice value, millrace_error **error);

/* Deletes a key, whether it exists or not. */
millrace_code millrace_delete(const millrace_db *db, const millrace_family *family, millrace_slice key,
                              millrace_error **error);

/* Deletes all keys from `start` to before `end`, with one write. Neither can be left out: NULL is the empty key. */
millrace_code millrace_delete_range(const millrace_db *db, const millrace_family *family, millrace_slice start,
                                    millrace_slice end, millrace_error **error);

/* Adds an operand to a key, which the merge operator of the database combines with its value. */
millrace_code millrace_merge(const millrace_db *db, const millrace_family *family, millrace_slice key,
                             millrace_slice operand, millrace_error **error);

/* Writes a batch, all of it or nothing. Takes its writes: it is empty afterwards, also after an error of the write, and
 * can be filled again. It is yours as before. */
millrace_code millrace_write(const millrace_db *db, millrace_batch *batch, millrace_error **error);

/* Makes everything that was acknowledged before survive a power cut: of use with MILLRACE_DURABILITY_PROCESS. */
millrace_code millrace_sync(const millrace_db *db, millrace_error **error);

/* Writes all memtables to tables. Not needed for durability. */
millrace_code millrace_flush(const millrace_db *db, millrace_error **error);

/* Compacts the keys from `start` to before `end` into the deepest level. Each may be millrace_unbounded(). */
millrace_code millrace_compact_range(const millrace_db *db, const millrace_family *family, millrace_slice start,
                                     millrace_slice end, millrace_error **error);

/* Makes a checkpoint in a new directory: the database as it is now, as hard links where the file system allows. It can
 * be opened as a database. */
millrace_code millrace_checkpoint(const millrace_db *db, const char *path, millrace_error **error);

/* ---- Column families ------------------------------------------------------------------------------------------ */

/* The column family with a name, in UTF-8. You free *family with millrace_family_free(). */
millrace_code millrace_family_open(const millrace_db *db, const char *name, millrace_family **family,
                                   millrace_error **error);

/* Creates a column family, durably. You free *family with millrace_family_free(). */
millrace_code millrace_family_create(const millrace_db *db, const char *name, millrace_family **family,
                                     millrace_error **error);

/* Drops a column family with everything in it. Its handles stay yours; calls with them fail. */
millrace_code millrace_family_drop(const millrace_db *db, const char *name, millrace_error **error);

/* The name of a column family, valid until the handle is freed. */
const char *millrace_family_name(const millrace_family *family);

/* Frees the handle of a column family, which is still in the database. */
void millrace_family_free(millrace_family *family);

/* The names of all column families, the default one first. You free *names with millrace_names_free(). */
millrace_code millrace_family_list(const millrace_db *db, millrace_names **names, millrace_error **error);

/* The number of names. */
size_t millrace_names_count(const millrace_names *names);

/* A name, valid until the names are freed; NULL if `index` is not below their number. */
const char *millrace_names_get(const millrace_names *names, size_t index);

/* Frees names. */
void millrace_names_free(millrace_names *names);

/* ---- Batches -------------------------------------------------------------------------------------------------- */

/* Makes a batch without writes, which you free with millrace_batch_free(). Writes are done in the order in which they
 * are added. All column families of a batch belong to one database. */
millrace_batch *millrace_batch_new(void);

/* Frees a batch. */
void millrace_batch_free(millrace_batch *batch);

/* Sets a key. */
millrace_code millrace_batch_put(millrace_batch *batch, const millrace_family *family, millrace_slice key,
                                 millrace_slice value, millrace_error **error);

/* Deletes a key. */
millrace_code millrace_batch_delete(millrace_batch *batch, const millrace_family *family, millrace_slice key,
                                    millrace_error **error);

/* Deletes all keys from `start` to before `end`. */
millrace_code millrace_batch_delete_range(millrace_batch *batch, const millrace_family *family, millrace_slice start,
                                          millrace_slice end, millrace_error **error);

/* Adds an operand to a key. */
millrace_code millrace_batch_merge(millrace_batch *batch, const millrace_family *family, millrace_slice key,
                                   millrace_slice operand, millrace_error **error);

/* Removes all writes, and keeps the memory. */
void millrace_batch_clear(millrace_batch *batch);

/* The number of writes. */
size_t millrace_batch_count(const millrace_batch *batch);

/* Bytes of the writes, as they go into the log. A batch that is written may have 256 MiB. */
size_t millrace_batch_bytes(const millrace_batch *batch);

/* ---- Snapshots ------------------------------------------------------------------------------------------------ */

/* Takes a snapshot of the present state of all column families. You free *snapshot with millrace_snapshot_free(). It
 * expires after an hour; about a thousand may be held for each core. */
millrace_code millrace_snapshot_new(const millrace_db *db, millrace_snapshot **snapshot, millrace_error **error);

/* Releases a snapshot. Iterators that read it go on. */
void millrace_snapshot_free(millrace_snapshot *snapshot);

/* millrace_get() of that state. */
millrace_code millrace_snapshot_get(const millrace_snapshot *snapshot, const millrace_family *family,
                                    millrace_slice key, millrace_value *value, millrace_error **error);

/* millrace_multi_get() of that state. */
millrace_code millrace_snapshot_multi_get(const millrace_snapshot *snapshot, const millrace_family *family,
                                          const millrace_slice *keys, size_t count, millrace_value *values,
                                          millrace_error **error);

/* ---- Iterators ------------------------------------------------------------------------------------------------ */

enum {
  /* From the last key to the first. */
  MILLRACE_REVERSE = 1,
  /* Without `start`. */
  MILLRACE_EXCLUDE_START = 2,
  /* With `end`. */
  MILLRACE_INCLUDE_END = 4
};

/* The entries from `start` to before `end`, in their order; `flags` is 0 or some of the above. Each bound may be
 * millrace_unbounded(), and `snapshot` NULL: then they are of the moment of the first millrace_iter_next(). You free
 * *iter with millrace_iter_free(). */
millrace_code millrace_range(const millrace_db *db, const millrace_family *family, const millrace_snapshot *snapshot,
                             millrace_slice start, millrace_slice end, unsigned flags, millrace_iter **iter,
                             millrace_error **error);

/* The entries whose keys begin with a prefix; `flags` is 0 or MILLRACE_REVERSE. You free *iter with
 * millrace_iter_free(). */
millrace_code millrace_prefix(const millrace_db *db, const millrace_family *family, const millrace_snapshot *snapshot,
                              millrace_slice prefix, unsigned flags, millrace_iter **iter, millrace_error **error);

/* Goes to the next entry, or to the first. False: there is none; millrace_iter_status() tells why. Key and value belong
 * to the iterator, and are valid until the next call with it. Each argument but the first may be NULL. */
bool millrace_iter_next(millrace_iter *iter, millrace_slice *key, millrace_slice *value);

/* MILLRACE_OK, or the error that has ended the iterator. */
millrace_code millrace_iter_status(const millrace_iter *iter, millrace_error **error);

/* Frees an iterator. */
void millrace_iter_free(millrace_iter *iter);

/* ---- Transactions --------------------------------------------------------------------------------------------- */

/* Begins an optimistic transaction: it reads the present state and its own writes, and locks nothing. You end it with
 * millrace_transaction_commit() or millrace_transaction_free(). */
millrace_code millrace_transaction_begin(const millrace_db *db, millrace_transaction **transaction,
                                         millrace_error **error);

/* Looks up a key, which nobody else may write until the commit. You free *value with millrace_value_free(). */
millrace_code millrace_transaction_get(millrace_transaction *transaction, const millrace_family *family,
                                       millrace_slice key, millrace_value *value, millrace_error **error);

/* Sets a key, when the transaction is committed. */
millrace_code millrace_transaction_put(millrace_transaction *transaction, const millrace_family *family,
                                       millrace_slice key, millrace_slice value, millrace_error **error);

/* Deletes a key, when the transaction is committed. */
millrace_code millrace_transaction_delete(millrace_transaction *transaction, const millrace_family *family,
                                          millrace_slice key, millrace_error **error);

/* Makes all writes visible and durable, and frees the transaction, also after an error. MILLRACE_CONFLICT: somebody has
 * written a key that it has read, so nothing was written, and you begin again. */
millrace_code millrace_transaction_commit(millrace_transaction *transaction, millrace_error **error);

/* Abandons a transaction and frees it. */
void millrace_transaction_free(millrace_transaction *transaction);

/* ---- Clients -------------------------------------------------------------------------------------------------- */

/*
 * A client talks to a Millrace node on this machine or another one. All calls but ranges work with any Redis server.
 *
 * A thread that calls has a connection for itself until it has its answer, so there are as many connections as threads
 * that wait at the same time. They are kept for later calls, up to 256.
 *
 * Every call ends within the timeout, whatever the server or the network does. Until then it is made again if the
 * connection breaks or none can be made, but only if it reads, or if nothing of it was sent. Any other write without an
 * answer fails with MILLRACE_OUTCOME_UNKNOWN. A call that fails with any other code has changed nothing.
 */

/* Makes the default options, which you free with millrace_client_options_free(). They can be used for several clients. */
millrace_client_options *millrace_client_options_new(void);

/* Frees options. Clients that were connected with them keep what they need. */
void millrace_client_options_free(millrace_client_options *options);

/* The password; none by default. One in the address takes its place. */
millrace_code millrace_client_options_set_password(millrace_client_options *options, const char *password,
                                                   millrace_error **error);

/* The user whose password it is; "default" by default. */
millrace_code millrace_client_options_set_user(millrace_client_options *options, const char *user,
                                               millrace_error **error);

/* The number of the database, for Redis servers that have several; 0 by default. */
millrace_code millrace_client_options_set_database(millrace_client_options *options, uint32_t number,
                                                   millrace_error **error);

/* The longest time that a call takes, with all its attempts; 5,000 ms by default. All times are from 1 ms to a day. */
millrace_code millrace_client_options_set_timeout_ms(millrace_client_options *options, uint64_t ms,
                                                     millrace_error **error);

/* The longest time for making one connection, with its name look-up and password; 2,000 ms by default. */
millrace_code millrace_client_options_set_connect_timeout_ms(millrace_client_options *options, uint64_t ms,
                                                             millrace_error **error);

/* Whether calls are made again where that is safe; on by default. */
millrace_code millrace_client_options_set_retry(millrace_client_options *options, int retry, millrace_error **error);

/* Caches what is read, in at most so many bytes; 0, the default, is no cache. The server tells the client what others
 * write. It must know HELLO 3 and CLIENT TRACKING, as Redis does since 6.0. */
millrace_code millrace_client_options_set_cache(millrace_client_options *options, size_t bytes,
                                                millrace_error **error);

/* How long a cached value may be served while the server is not heard of; 3,000 ms by default. */
millrace_code millrace_client_options_set_staleness_max_ms(millrace_client_options *options, uint64_t ms,
                                                           millrace_error **error);

/* Fetches what was written before and after a value that is read into the cache, up to so many bytes at once, if the
 * program reads in about the order in which the data was written; 0, the default, is none, and 10 MiB is good for most.
 * It needs a cache of at least 2 MiB, and a node that keeps values in blob files (serve --blob-min). */
millrace_code millrace_client_options_set_read_ahead(millrace_client_options *options, size_t bytes,
                                                     millrace_error **error);

/* Keeps an index of all keys of the database, in at most so many bytes, so that reads of keys that do not exist need no
 * round trip; 0, the default, is none. A key takes 5 to 8 bytes. It needs a cache and a Millrace node, and is for
 * databases that are mostly read. */
millrace_code millrace_client_options_set_index(millrace_client_options *options, size_t bytes,
                                                millrace_error **error);

/* The longest reply that is accepted, in bytes; 1 GiB by default. */
millrace_code millrace_client_options_set_reply_bytes_max(millrace_client_options *options, size_t bytes,
                                                          millrace_error **error);

/* Whether to speak TLS; off by default. An address that begins with rediss:// does it too. The server's certificate must
 * be signed by an authority that the system trusts, for the host of the address. 0 also takes back the three below. */
millrace_code millrace_client_options_set_tls(millrace_client_options *options, int tls, millrace_error **error);

/* Speaks TLS, and trusts only the certificates of this PEM file. */
millrace_code millrace_client_options_set_tls_authority(millrace_client_options *options, const char *file,
                                                        millrace_error **error);

/* Speaks TLS, and shows the server the certificates of this PEM file, with the key of the other one. */
millrace_code millrace_client_options_set_tls_certificate(millrace_client_options *options, const char *file,
                                                          const char *key, millrace_error **error);

/* Speaks TLS, and expects this name in the server's certificate instead of the host of the address. */
millrace_code millrace_client_options_set_tls_server_name(millrace_client_options *options, const char *name,
                                                          millrace_error **error);

/* Connects to "HOST:PORT", or to "redis://[[USER]:PASSWORD@]HOST[:PORT][/DATABASE]", or to "rediss://..." with TLS.
 * `options` may be NULL for the defaults. A first connection is not tried again. You free *client with
 * millrace_client_close(). */
millrace_code millrace_client_connect(const char *address, const millrace_client_options *options,
                                      millrace_client **client, millrace_error **error);

/* Ends the connections, and frees the client. What was acknowledged is done. */
void millrace_client_close(millrace_client *client);

/* Looks up a key. You free *value with millrace_value_free(). That there is no such key is no error: value->data is
 * NULL then. */
millrace_code millrace_client_get(const millrace_client *client, millrace_slice key, millrace_value *value,
                                  millrace_error **error);

/* Looks up many keys in as few round trips as possible. values[i] is the value of keys[i]; you free all `count` of them,
 * for example with millrace_values_free(). After an error there are none. Each may be of another moment. */
millrace_code millrace_client_multi_get(const millrace_client *client, const millrace_slice *keys, size_t count,
                                        millrace_value *values, millrace_error **error);

/* Sets a key. It returns when the write is as durable as the node makes its writes. */
millrace_code millrace_client_set(const millrace_client *client, millrace_slice key, millrace_slice value,
                                  millrace_error **error);

/* Sets a key that the server removes after so many milliseconds, from 1 to 2^62; they begin when it makes the write.
 * millrace_client_set() and millrace_client_write() take such a deadline away. Other times are
 * MILLRACE_INVALID_OPTION. */
millrace_code millrace_client_set_with_ttl(const millrace_client *client, millrace_slice key, millrace_slice value,
                                           uint64_t ttl_ms, millrace_error **error);

/* Gives a key that is there so many milliseconds to live, from now on, instead of what it has. *existed tells whether
 * there is such a key; it may be NULL. */
millrace_code millrace_client_expire(const millrace_client *client, millrace_slice key, uint64_t ttl_ms, bool *existed,
                                     millrace_error **error);

/* Takes the deadline of a key away. *had_ttl tells whether it had one; it may be NULL. */
millrace_code millrace_client_persist(const millrace_client *client, millrace_slice key, bool *had_ttl,
                                      millrace_error **error);

enum {
  /* The key has no deadline. */
  MILLRACE_FOREVER = -1,
  /* There is no such key. */
  MILLRACE_NO_KEY = -2
};

/* How many milliseconds a key has left, or one of the above; after an error it is MILLRACE_NO_KEY. The server is asked,
 * not the cache. */
millrace_code millrace_client_ttl(const millrace_client *client, millrace_slice key, int64_t *ttl_ms,
                                  millrace_error **error);

/* Deletes a key. *existed tells whether there was one; it may be NULL. */
millrace_code millrace_client_delete(const millrace_client *client, millrace_slice key, bool *existed,
                                     millrace_error **error);

/* Deletes all keys from `start` to before `end`, with one write; *count, which may be NULL, tells how many there were.
 * Neither bound can be left out: NULL is the empty key. Only on a Millrace node. */
millrace_code millrace_client_delete_range(const millrace_client *client, millrace_slice start, millrace_slice end,
                                           uint64_t *count, millrace_error **error);

/* Writes a batch, all of it or nothing. Takes its writes: it is empty afterwards, also after an error of the write, and
 * can be filled again. It is yours as before. */
millrace_code millrace_client_write(const millrace_client *client, millrace_client_batch *batch,
                                    millrace_error **error);

/* The entries from `start` to before `end`, as for millrace_range(): `flags` is 0 or some of MILLRACE_REVERSE,
 * MILLRACE_EXCLUDE_START and MILLRACE_INCLUDE_END. They are read in pages, each of its own moment, and not cached. Only
 * on a Millrace node. You free *iter with millrace_iter_free(). */
millrace_code millrace_client_range(const millrace_client *client, millrace_slice start, millrace_slice end,
                                    unsigned flags, millrace_iter **iter, millrace_error **error);

/* The entries whose keys begin with a prefix; `flags` is 0 or MILLRACE_REVERSE. Only on a Millrace node. You free *iter
 * with millrace_iter_free(). */
millrace_code millrace_client_prefix(const millrace_client *client, millrace_slice prefix, unsigned flags,
                                     millrace_iter **iter, millrace_error **error);

/* After this, no read of this client returns a value older than the call. It costs a round trip; without a cache there
 * is nothing to do. Use it after something outside of the database has told of a write. */
millrace_code millrace_client_wait_coherent(const millrace_client *client, millrace_error **error);

/* The counts of a client's cache; all are 0 without a cache. Later versions add fields at the end. */
typedef struct millrace_cache_stats {
  /* Reads of a key that the cache answered, and those that the server had to answer. */
  uint64_t hits;
  uint64_t misses;
  /* Keys that the server has invalidated, whether they were cached or not. */
  uint64_t invalidations;
  /* Times that everything was dropped, because the connection ended or all keys or a range of them were removed. */
  uint64_t clears;
  /* Entries now, bytes of their keys and values, and bytes of memory used for them. */
  uint64_t entries;
  uint64_t bytes_cached;
  uint64_t bytes_used;
  /* Stretches that were fetched by read-ahead, the values that they have brought, and those of them that were read. */
  uint64_t stretches;
  uint64_t values_ahead;
  uint64_t values_ahead_used;
  /* Times that a read had to be sent to the server, or a stretch was asked for. */
  uint64_t round_trips;
  /* The index: 1 if it is whole, its keys, its bytes of memory, the reads that it has answered, the times that it was
   * loaded, and how long the last time took, in nanoseconds. */
  uint64_t index_is_whole;
  uint64_t index_keys;
  uint64_t index_bytes;
  uint64_t index_answers;
  uint64_t index_loads;
  uint64_t index_load_ns;
} millrace_cache_stats;

/* Fills *stats; `size` is sizeof(millrace_cache_stats) of this header. */
millrace_code millrace_client_cache_stats(const millrace_client *client, millrace_cache_stats *stats, size_t size,
                                          millrace_error **error);

/* Makes a batch without writes, which you free with millrace_client_batch_free(). Writes are done in the order in which
 * they are added. A batch that is written may have 256 MiB. */
millrace_client_batch *millrace_client_batch_new(void);

/* Frees a batch. */
void millrace_client_batch_free(millrace_client_batch *batch);

/* Sets a key. */
millrace_code millrace_client_batch_set(millrace_client_batch *batch, millrace_slice key, millrace_slice value,
                                        millrace_error **error);

/* millrace_client_set_with_ttl(); the time begins when the server makes the batch, which may have 4,000 such keys. An
 * impossible time is an error of the write. */
millrace_code millrace_client_batch_set_with_ttl(millrace_client_batch *batch, millrace_slice key,
                                                 millrace_slice value, uint64_t ttl_ms, millrace_error **error);

/* Deletes a key. */
millrace_code millrace_client_batch_delete(millrace_client_batch *batch, millrace_slice key, millrace_error **error);

/* Deletes all keys from `start` to before `end`. Only on a Millrace node. */
millrace_code millrace_client_batch_delete_range(millrace_client_batch *batch, millrace_slice start,
                                                 millrace_slice end, millrace_error **error);

/* Removes all writes. */
void millrace_client_batch_clear(millrace_client_batch *batch);

/* The number of writes. */
size_t millrace_client_batch_count(const millrace_client_batch *batch);

/* Bytes of all keys and values. */
size_t millrace_client_batch_bytes(const millrace_client_batch *batch);

/* Begins an optimistic transaction, which has a connection for itself from its first read to its end. It reads from the
 * server, not from the cache, and sees its own writes. You end it with millrace_client_transaction_commit() or
 * millrace_client_transaction_free(). */
millrace_code millrace_client_transaction_begin(const millrace_client *client,
                                                millrace_client_transaction **transaction, millrace_error **error);

/* Looks up a key, which nobody else may write until the commit. You free *value with millrace_value_free(). If the
 * connection breaks, the transaction fails: begin again. */
millrace_code millrace_client_transaction_get(millrace_client_transaction *transaction, millrace_slice key,
                                              millrace_value *value, millrace_error **error);

/* Sets a key, when the transaction is committed. */
millrace_code millrace_client_transaction_set(millrace_client_transaction *transaction, millrace_slice key,
                                              millrace_slice value, millrace_error **error);

/* millrace_client_set_with_ttl(), when the transaction is committed. An impossible time is an error of the commit. */
millrace_code millrace_client_transaction_set_with_ttl(millrace_client_transaction *transaction, millrace_slice key,
                                                       millrace_slice value, uint64_t ttl_ms, millrace_error **error);

/* Deletes a key, when the transaction is committed. */
millrace_code millrace_client_transaction_delete(millrace_client_transaction *transaction, millrace_slice key,
                                                 millrace_error **error);

/* Makes all writes as one, and frees the transaction, also after an error. MILLRACE_CONFLICT: somebody has written a key
 * that it has read, so nothing was written, and you begin again. */
millrace_code millrace_client_transaction_commit(millrace_client_transaction *transaction, millrace_error **error);

/* Abandons a transaction and frees it. */
void millrace_client_transaction_free(millrace_client_transaction *transaction);

/* ---- Asynchronous calls --------------------------------------------------------------------------------------- */

/*
 * A completion queue is for programs with an event loop. An asynchronous call hands its request over and returns. The
 * queue's file descriptor is readable when requests have been answered; then take completions, until
 * millrace_queue_take() returns 0 or less than there was room for.
 *
 * Operations end in any order. Each that has begun (its call returned MILLRACE_OK) has exactly one completion, with the
 * tag of the call. When many requests are on their way, some are handed over only by millrace_queue_take(): call it
 * whenever the descriptor is readable.
 *
 * A queue may have operations of several databases and clients. You may close these meanwhile; what has not been done
 * then ends with MILLRACE_CLOSED, and a write of a client that was on its way with MILLRACE_OUTCOME_UNKNOWN.
 */

/* The end of an operation. `code` is its result, `error` the error, or NULL. `value` is what a get has found. `values`
 * has what a millrace_async_client_multi_get() has found, in the order of its keys, or the entries of a
 * millrace_async_range_next(), and `count` their number; otherwise it is NULL. For a millrace_async_client_delete(), _delete_range() and _expire(), `count` is the number of keys that
 * there were; for _persist(), of deadlines. For _ttl(), (int64_t)count is what millrace_client_ttl() tells. You free everything with
 * millrace_completion_free(). Do not change the fields. */
typedef struct millrace_completion {
  uint64_t tag;
  millrace_code code;
  millrace_error *error;
  millrace_value value;
  millrace_value *values;
  uint64_t count;
} millrace_completion;

/* Makes a queue for at most `capacity` operations, each counted from its call until its completion is taken. You free
 * *queue with millrace_queue_free(). */
millrace_code millrace_queue_new(size_t capacity, millrace_queue **queue, millrace_error **error);

/* Waits for the end of all operations of a queue, forgets their completions, and frees it. */
void millrace_queue_free(millrace_queue *queue);

/* The file descriptor: an eventfd for poll(), select() or epoll. It belongs to the queue; do not read, write or close
 * it. -1 for NULL. */
int millrace_queue_fd(const millrace_queue *queue);

/* Takes at most `count` completions, and returns their number. Does not wait; it may return 0 although the descriptor
 * was readable. If more are left, the descriptor stays readable. */
size_t millrace_queue_take(const millrace_queue *queue, millrace_completion *completions, size_t count);

/* Frees the error and the values of a completion, but not the completion itself. A second call does nothing. */
void millrace_completion_free(millrace_completion *completion);

/* The following functions return MILLRACE_BUSY if the queue is full, MILLRACE_INVALID_ARGUMENT, and those of a client also
 * MILLRACE_CLOSED in a forked process: then nothing has begun, and there will be no completion. All other errors are
 * those of the completion. */

/* millrace_get(). */
millrace_code millrace_get_async(const millrace_db *db, const millrace_family *family, const millrace_queue *queue,
                                 millrace_slice key, uint64_t tag, millrace_error **error);

/* millrace_put(). */
millrace_code millrace_put_async(const millrace_db *db, const millrace_family *family, const millrace_queue *queue,
                                 millrace_slice key, millrace_slice value, uint64_t tag, millrace_error **error);

/* millrace_delete(). */
millrace_code millrace_delete_async(const millrace_db *db, const millrace_family *family, const millrace_queue *queue,
                                    millrace_slice key, uint64_t tag, millrace_error **error);

/* millrace_write(). The batch is empty afterwards if this returns MILLRACE_OK, and unchanged otherwise. */
millrace_code millrace_write_async(const millrace_db *db, const millrace_queue *queue, millrace_batch *batch,
                                   uint64_t tag, millrace_error **error);

/* millrace_sync(), of what was acknowledged before this call. */
millrace_code millrace_sync_async(const millrace_db *db, const millrace_queue *queue, uint64_t tag,
                                  millrace_error **error);

/*
 * A client for completion queues has one connection, which all its operations share: what is asked at the same time goes
 * out together. Operations that are on their way at the same time may be done in any order. It has a thread, a connection
 * and a cache of its own, so what it has cached is not in a millrace_client, and the other way round. Its functions return
 * at once, except those that connect and close.
 */

/* millrace_client_connect(), which waits. You free *client with millrace_async_client_close(). */
millrace_code millrace_async_client_connect(const char *address, const millrace_client_options *options,
                                            millrace_async_client **client, millrace_error **error);

/* Ends the connection and its thread, and frees the client. */
void millrace_async_client_close(millrace_async_client *client);

/* millrace_client_get(). */
millrace_code millrace_async_client_get(const millrace_async_client *client, const millrace_queue *queue,
                                        millrace_slice key, uint64_t tag, millrace_error **error);

/* millrace_client_multi_get(). */
millrace_code millrace_async_client_multi_get(const millrace_async_client *client, const millrace_queue *queue,
                                              const millrace_slice *keys, size_t count, uint64_t tag,
                                              millrace_error **error);

/* millrace_client_set(). */
millrace_code millrace_async_client_set(const millrace_async_client *client, const millrace_queue *queue,
                                        millrace_slice key, millrace_slice value, uint64_t tag,
                                        millrace_error **error);

/* millrace_client_set_with_ttl(). */
millrace_code millrace_async_client_set_with_ttl(const millrace_async_client *client, const millrace_queue *queue,
                                                 millrace_slice key, millrace_slice value, uint64_t ttl_ms,
                                                 uint64_t tag, millrace_error **error);

/* millrace_client_expire(). */
millrace_code millrace_async_client_expire(const millrace_async_client *client, const millrace_queue *queue,
                                           millrace_slice key, uint64_t ttl_ms, uint64_t tag, millrace_error **error);

/* millrace_client_persist(). */
millrace_code millrace_async_client_persist(const millrace_async_client *client, const millrace_queue *queue,
                                            millrace_slice key, uint64_t tag, millrace_error **error);

/* millrace_client_ttl(). */
millrace_code millrace_async_client_ttl(const millrace_async_client *client, const millrace_queue *queue,
                                        millrace_slice key, uint64_t tag, millrace_error **error);

/* millrace_client_delete(). */
millrace_code millrace_async_client_delete(const millrace_async_client *client, const millrace_queue *queue,
                                           millrace_slice key, uint64_t tag, millrace_error **error);

/* millrace_client_delete_range(). Only on a Millrace node. */
millrace_code millrace_async_client_delete_range(const millrace_async_client *client, const millrace_queue *queue,
                                                 millrace_slice start, millrace_slice end, uint64_t tag,
                                                 millrace_error **error);

/* millrace_client_write(). The batch is empty afterwards if this returns MILLRACE_OK, and unchanged otherwise. */
millrace_code millrace_async_client_write(const millrace_async_client *client, const millrace_queue *queue,
                                          millrace_client_batch *batch, uint64_t tag, millrace_error **error);

/* millrace_client_wait_coherent(), of what was written before this call. */
millrace_code millrace_async_client_wait_coherent(const millrace_async_client *client, const millrace_queue *queue,
                                                  uint64_t tag, millrace_error **error);

/* millrace_client_cache_stats(), which does not wait. */
millrace_code millrace_async_client_cache_stats(const millrace_async_client *client, millrace_cache_stats *stats,
                                                size_t size, millrace_error **error);

/*
 * Ranges and transactions may outlive the handle of their client; what is asked of them then ends with MILLRACE_CLOSED.
 * One operation of each is on its way at a time: other calls with it return MILLRACE_BUSY until it has ended.
 */

/* The entries from `start` to before `end`, with the flags of millrace_client_range(). It asks for nothing yet. Only on a
 * Millrace node. You free *range with millrace_async_range_free(). */
millrace_code millrace_async_client_range(const millrace_async_client *client, millrace_slice start,
                                          millrace_slice end, unsigned flags, millrace_async_range **range,
                                          millrace_error **error);

/* The entries whose keys begin with a prefix; `flags` is 0 or MILLRACE_REVERSE. Otherwise as the one above. */
millrace_code millrace_async_client_prefix(const millrace_async_client *client, millrace_slice prefix, unsigned flags,
                                           millrace_async_range **range, millrace_error **error);

/* Asks for the next entries, about 100 KiB of them. `values` of the completion has their keys and values by turns, and
 * `count` is twice their number. 0 is the end of the range, which an error is, too. */
millrace_code millrace_async_range_next(const millrace_async_range *range, const millrace_queue *queue, uint64_t tag,
                                        millrace_error **error);

/* Frees a range, at any time. */
void millrace_async_range_free(millrace_async_range *range);

/* Begins an optimistic transaction, as millrace_client_transaction_begin(). At most 64 of a client have a connection at
 * the same time, from their first read to their end; others wait for one. You free *transaction with
 * millrace_async_transaction_free(). */
millrace_code millrace_async_transaction_begin(const millrace_async_client *client,
                                               millrace_async_transaction **transaction, millrace_error **error);

/* millrace_client_transaction_get(). */
millrace_code millrace_async_transaction_get(const millrace_async_transaction *transaction,
                                             const millrace_queue *queue, millrace_slice key, uint64_t tag,
                                             millrace_error **error);

/* millrace_client_transaction_set(), which has no completion. */
millrace_code millrace_async_transaction_set(const millrace_async_transaction *transaction, millrace_slice key,
                                             millrace_slice value, millrace_error **error);

/* millrace_client_transaction_set_with_ttl(), which has no completion. */
millrace_code millrace_async_transaction_set_with_ttl(const millrace_async_transaction *transaction,
                                                      millrace_slice key, millrace_slice value, uint64_t ttl_ms,
                                                      millrace_error **error);

/* millrace_client_transaction_delete(), which has no completion. */
millrace_code millrace_async_transaction_delete(const millrace_async_transaction *transaction, millrace_slice key,
                                                millrace_error **error);

/* millrace_client_transaction_commit(), but it does not free the transaction: you do, also while this is on its way.
 * Other calls with it return MILLRACE_INVALID_ARGUMENT afterwards. */
millrace_code millrace_async_transaction_commit(const millrace_async_transaction *transaction,
                                                const millrace_queue *queue, uint64_t tag, millrace_error **error);

/* Frees a transaction. Without a commit it is abandoned. */
void millrace_async_transaction_free(millrace_async_transaction *transaction);

#ifdef __cplusplus
}
#endif

#endif

// Reads and writes a disk at random and verifies everything that it reads.
//
//   verify DEVICE SECONDS WORKERS MIB [ABOVE [holes|blind]]
//
// Each worker owns every WORKERS-th block of 4 KiB of the first MIB mebibytes, writes and reads with O_DIRECT, and counts
// its writes of each block. Each sector of a block has the block's number, that count, the sector's number and the run's,
// so a stale, torn or misplaced sector differs from the right one. In the end every written block is read again.
//
// A worker reads into a page that nothing else writes. GUEST READS INTO 0xADDRESS... names these pages by their physical
// addresses: the disk has written their contents.
//
// With ABOVE, in MiB, the workers' buffers move to memory at or above that physical address as soon as the machine has
// some: GUEST MOVED. 0 disables this.
//
// With `holes` blocks are also discarded, zeroed with and without releasing their space, and flushed. They must read as
// zeroes until they are written again.
//
// With `blind` nothing is compared: a null device keeps nothing.
//
// Each second, or every `tick` milliseconds if there is such a variable in the environment, prints GUEST TICK ops=N
// slowest_us=N (since the one before), and the end GUEST CHECKED ops=N swept=N slowest_ms=N
// emptied=N. A failure is printed immediately as GUEST WRONG ..., and the exit code is 1.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/falloc.h>
#include <linux/fs.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { BLOCK = 4096, SECTOR = 512, WORDS = SECTOR / 8 };

static int device;
static int workers, holes, blind;
static uint64_t blocks, run, end_ns;
static uint32_t *counts;
// Blocks that were emptied after their last write.
static uint8_t *empty;
static atomic_ulong operations, swept, emptied, slowest_ns;
static atomic_int wrong;
// For each worker, the page that it writes from and the one that it reads into.
static _Atomic(uint64_t *) *places;

static uint64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + t.tv_nsec;
}

static uint64_t mix(uint64_t x) {
  x ^= x >> 31;
  x *= 0x7fb5d329728ea185u;
  return x ^ x >> 27;
}

static void fill(uint64_t *words, uint64_t block, uint64_t count) {
  for (uint64_t sector = 0; sector < BLOCK / SECTOR; sector++, words += WORDS) {
    uint64_t head[4] = {block, count, sector, run};
    uint64_t x = mix(mix(mix(mix(block) ^ count) ^ sector) ^ run);
    for (int i = 0; i < WORDS; i++) words[i] = i < 4 ? head[i] : (x += 0x9e3779b97f4a7c15u);
  }
}

static void complain(const char *what, uint64_t block, const char *why) {
  if (atomic_fetch_add(&wrong, 1) < 5) printf("GUEST WRONG %s block=%lu %s\n", what, (unsigned long)block, why);
}

static void timed(uint64_t from) {
  uint64_t took = now_ns() - from, slowest = slowest_ns;
  while (took > slowest && !atomic_compare_exchange_weak(&slowest_ns, &slowest, took)) {}
}

static void write_block(uint64_t *buffer, uint64_t block) {
  fill(buffer, block, counts[block] + 1);
  uint64_t from = now_ns();
  ssize_t n = pwrite(device, buffer, BLOCK, block * BLOCK);
  timed(from);
  if (n != BLOCK) complain("write", block, strerror(errno));
  counts[block]++;
  empty[block] = 0;
}

static void empty_block(uint64_t block, int how) {
  uint64_t range[2] = {block * BLOCK, BLOCK};
  uint64_t from = now_ns();
  int failed = how == 0   ? ioctl(device, BLKDISCARD, range)
               : how == 1 ? ioctl(device, BLKZEROOUT, range)
               : how == 2 ? fallocate(device, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, range[0], BLOCK)
                          : fsync(device);
  timed(from);
  if (failed) complain("empty", block, strerror(errno));
  if (how < 3) empty[block] = 1, emptied++;
}

static void read_block(uint64_t *buffer, uint64_t *right, uint64_t block) {
  if (!counts[block]) return;
  uint64_t from = now_ns();
  ssize_t n = pread(device, buffer, BLOCK, block * BLOCK);
  timed(from);
  if (n != BLOCK) {
    complain("read", block, strerror(errno));
    return;
  }
  if (blind) return;
  if (empty[block]) memset(right, 0, BLOCK);
  else fill(right, block, counts[block]);
  for (int s = 0; s < BLOCK / SECTOR; s++) {
    uint64_t *got = buffer + s * WORDS;
    if (memcmp(got, right + s * WORDS, SECTOR)) {
      char why[160];
      snprintf(why, sizeof why, "sector=%d expected write %u%s, found block %lx write %lu sector %lu", s, counts[block],
               empty[block] ? " and emptied" : "", (unsigned long)got[0], (unsigned long)got[1], (unsigned long)got[2]);
      complain("data", block, why);
      return;
    }
  }
}

static void *work(void *argument) {
  uint64_t me = (uintptr_t)argument, own = (blocks - me + workers - 1) / workers, x = mix(run + me) | 1;
  uint64_t right[BLOCK / 8];
  while (now_ns() < end_ns && !wrong) {
    x ^= x >> 12, x ^= x << 25, x ^= x >> 27;
    uint64_t drawn = x * 0x2545f4914f6cdd1du, block = (drawn >> 16) % own * workers + me;
    if (!counts[block] || drawn & 1) write_block(places[2 * me], block);
    else if (holes && (drawn >> 1) % 4 == 0) empty_block(block, (drawn >> 3) % 4);
    else read_block(places[2 * me + 1], right, block);
    operations++;
  }
  for (uint64_t block = me; block < blocks && !wrong; block += workers) {
    if (counts[block]) swept++;
    read_block(places[2 * me + 1], right, block);
  }
  return NULL;
}

// The physical address of a page, which must have been written.
static uint64_t physical(const void *page) {
  static int map = -1;
  uint64_t entry;
  if (map < 0) map = open("/proc/self/pagemap", O_RDONLY);
  if (pread(map, &entry, 8, (uintptr_t)page / BLOCK * 8) != 8) abort();
  // The lower 55 bits are the page frame number.
  return (entry & ((UINT64_C(1) << 55) - 1)) * BLOCK;
}

// Gives each worker two pages at or above a physical address.
static int move(uint64_t above, size_t length) {
  int found = 0;
  // Shared, so that no page is moved into a huge page.
  char *memory = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  uint64_t *pages[2 * workers];
  if (memory == MAP_FAILED) abort();
  for (char *page = memory; page < memory + length && found < 2 * workers; page += BLOCK) {
    *page = 1;
    if (physical(page) >= above) pages[found++] = (uint64_t *)page;
  }
  if (found < 2 * workers) {
    munmap(memory, length);
    return 0;
  }
  for (int i = 0; i < 2 * workers; i++) places[i] = pages[i];
  char text[32 * workers], *end = text;
  for (int i = 0; i < workers; i++) end += sprintf(end, " %#lx", (unsigned long)physical(pages[2 * i + 1]));
  printf("GUEST READS INTO%s\n", text);
  return 1;
}

int main(int argc, char **argv) {
  if (argc < 5 || argc > 7) return 2;
  setvbuf(stdout, NULL, _IOLBF, 0);
  device = open(argv[1], O_RDWR | O_DIRECT);
  if (device < 0) return perror(argv[1]), 2;
  long seconds = atol(argv[2]);
  workers = atoi(argv[3]);
  off_t size = lseek(device, 0, SEEK_END);
  blocks = (uint64_t)atol(argv[4]) << 20;
  if (blocks > (uint64_t)size) blocks = size;
  blocks /= BLOCK;
  if (workers < 1 || blocks < (uint64_t)workers) return 2;
  counts = calloc(blocks, sizeof *counts);
  empty = calloc(blocks, sizeof *empty);
  run = now_ns() ^ (uint64_t)time(NULL) << 32;
  end_ns = now_ns() + seconds * 1000000000u;
  pthread_t *threads = calloc(workers, sizeof *threads);
  places = calloc(2 * workers, sizeof *places);
  holes = argc == 7 && !strcmp(argv[6], "holes");
  blind = argc == 7 && !strcmp(argv[6], "blind");
  uint64_t above = argc >= 6 ? (uint64_t)atol(argv[5]) << 20 : 0;
  printf("GUEST LOAD workers=%d blocks=%lu\n", workers, (unsigned long)blocks);
  if (!move(0, 2 * workers * BLOCK)) abort();
  for (uintptr_t i = 0; i < (uintptr_t)workers; i++)
    if (pthread_create(&threads[i], NULL, work, (void *)i)) return 2;
  const char *tick = getenv("tick");
  unsigned tick_ms = tick ? atoi(tick) : 1000;
  uint64_t slowest = 0;
  while (now_ns() < end_ns && !wrong) {
    usleep(tick_ms * 1000);
    if (above && move(above, 32 << 20)) {
      puts("GUEST MOVED");
      above = 0;
    }
    uint64_t of_tick = atomic_exchange(&slowest_ns, 0);
    if (of_tick > slowest) slowest = of_tick;
    printf("GUEST TICK ops=%lu slowest_us=%lu\n", (unsigned long)operations, (unsigned long)(of_tick / 1000));
  }
  for (int i = 0; i < workers; i++) pthread_join(threads[i], NULL);
  if (slowest_ns > slowest) slowest = slowest_ns;
  if (fsync(device)) complain("flush", 0, strerror(errno));
  printf("GUEST CHECKED ops=%lu swept=%lu slowest_ms=%lu emptied=%lu\n", (unsigned long)operations,
         (unsigned long)swept, (unsigned long)(slowest / 1000000), (unsigned long)emptied);
  return wrong != 0;
}

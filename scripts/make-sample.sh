#!/usr/bin/env bash
# Makes a RocksDB database with RocksDB's own db_bench: the one the benchmark reads.
#
#   scripts/make-sample.sh DIR [NUM]      NUM keys (default 4000000, about 4.2 GB)
#
# 16-byte keys, 1000-byte values, blocks of 4 KiB, a Bloom filter of 10 bits a key, no compression;
# filled in key order and compacted, so that every key 0..NUM-1 is there exactly once.
# db_bench's key: the number as 8 bytes, highest first, then eight bytes '0'.
set -euo pipefail

usage() { sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2; }
[ $# -ge 1 ] && [ $# -le 2 ] || usage
dir=$1
num=${2:-4000000}
case $num in ''|*[!0-9]*) echo "make-sample: NUM is a number of keys, not '$num'" >&2; exit 2;; esac

if ! command -v db_bench >/dev/null; then
  echo "make-sample: db_bench is missing: apt-get install rocksdb-tools" >&2
  exit 1
fi
if [ -e "$dir/CURRENT" ]; then
  echo "make-sample: $dir holds a database already; remove it or name another directory" >&2
  exit 1
fi
mkdir -p "$dir"

# Compacting writes everything a second time before the first copy goes.
need_kib=$(( num * 1100 / 1024 * 2 + 100 * 1024 ))
free_kib=$(df --output=avail -k "$dir" | tail -1)
if [ "$free_kib" -lt "$need_kib" ]; then
  echo "make-sample: $dir needs $(( need_kib / 1024 )) MiB free while it is made, and has $(( free_kib / 1024 ))" >&2
  exit 1
fi

db_bench --db="$dir" --benchmarks=fillseq,compact --num="$num" \
  --key_size=16 --value_size=1000 --block_size=4096 --bloom_bits=10 --compression_type=none \
  --max_background_jobs=2 --seed=1 >"$dir.log" 2>&1 </dev/null \
  || { tail -20 "$dir.log" >&2; exit 1; }
rm -f "$dir.log"
echo "make-sample: $num keys in $dir ($(du -sh "$dir" | cut -f1))" >&2

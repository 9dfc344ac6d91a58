#!/usr/bin/env bash
# Installs what building, testing and the demo need; doing it twice changes nothing.
# As root on Debian or Ubuntu it installs the missing packages; elsewhere it says what is missing and ends with 1.
# `setup.sh demo` asks only for what the demo needs; `setup.sh missing` only names the packages that are missing.
set -euo pipefail
cd "$(dirname "$0")/../.."

# command:package, for commands that some script or test of this repository calls.
needed=(
  cc:gcc            # the linker
  g++:g++           # the fuzzer's runtime is C++
  python3:python3   # tests/bin/*.py
  fusermount3:fuse3 # mounts without root
  ip:iproute2       # network namespaces, rails taken away
  nft:nftables      # rails that lose packets, where the kernel has no netem
  jq:jq             # the demo reads `status --json`
  # building verbs rails (the Cargo feature `rdma`); running them needs libibverbs1 and ibverbs-providers only
  ibverbs-headers:libibverbs-dev
  rdmacm-headers:librdmacm-dev
  pkg-config:pkg-config
  libclang:libclang-14-dev
  # tests/lab: guests with another kernel, Soft-RoCE and systemd
  qemu-system-x86_64:qemu-system-x86
  modprobe:kmod
  cpio:cpio
  mkfs.ext4:e2fsprogs
  dmsetup:dmsetup
  ibv_devinfo:ibverbs-utils
  ib_write_bw:perftest
  strip:binutils
  static-busybox:busybox-static
  librxe:ibverbs-providers
  /lib/systemd/systemd:systemd
  fio:fio           # make bench, and tests that read with it
  git:git           # tests run these on a mount
  rsync:rsync
  sqlite3:sqlite3
  getfattr:attr
  faketime:faketime # a server with another clock
)
[[ ${1:-} == demo ]] && needed=(cc:gcc python3:python3 fusermount3:fuse3 ip:iproute2 jq:jq unshare:util-linux
  ibverbs-headers:libibverbs-dev rdmacm-headers:librdmacm-dev pkg-config:pkg-config libclang:libclang-14-dev)

say() { echo "setup: $*"; }
fail() {
  echo "setup: $*" >&2
  exit 1
}

version_at_least() { # HAVE WANT
  [[ $(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1) == "$2" ]]
}

# Whether a command is there, or what else stands before the colon above.
is_there() {
  local path
  case $1 in
    static-busybox) path=$(command -v busybox) && ! ldd "$path" >/dev/null 2>&1 ;;
    ibverbs-headers) [[ -e /usr/include/infiniband/verbs.h ]] ;;
    rdmacm-headers) [[ -e /usr/include/rdma/rdma_cma.h ]] ;;
    # 13 to 15: newer ones write layouts that the generator of rdma-sys does not read.
    # libclang-cpp, which other programs bring along, is another library.
    libclang)
      [[ -n ${LIBCLANG_PATH:-} ]] || compgen -G "${RAILFS_LLVM:-/usr/lib}/llvm-1[345]/lib/libclang.so*" >/dev/null ||
        compgen -G "${RAILFS_LLVM:-/usr/lib}/llvm-1[345]/lib/libclang-1*.so*" >/dev/null
      ;;
    librxe) compgen -G '/usr/lib/*/libibverbs/librxe-*' >/dev/null ;;
    # iproute2 and others live in /usr/sbin, which an ordinary user's PATH may lack.
    *) PATH="$PATH:/usr/sbin:/sbin" command -v "$1" >/dev/null ;;
  esac
}

packages=()
missing=()
for entry in "${needed[@]}"; do
  command=${entry%%:*}
  if ! is_there "$command"; then
    missing+=("$command")
    packages+=("${entry#*:}")
  fi
done

if [[ ${1:-} == missing ]]; then
  ((${#packages[@]} == 0)) || printf '%s\n' "${packages[@]}"
  exit 0
fi
if ((${#packages[@]} > 0)); then
  if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
    say "installing ${packages[*]}"
    log=$(mktemp)
    if ! { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${packages[@]}"; } \
      >"$log" 2>&1 </dev/null; then
      tail -n 20 "$log" >&2
      fail "apt-get could not install ${packages[*]}; its last lines are above, all of them in $log"
    fi
    rm -f "$log"
  else
    fail "missing: ${missing[*]}. Install the packages ${packages[*]} (as root: apt-get install ${packages[*]}), then run this again"
  fi
fi

command -v cargo >/dev/null || fail "cargo is missing: install Rust $(sed -n 's/^rust-version *= *"\(.*\)"/\1/p' Cargo.toml) or newer (rustup), then run this again"
want=$(sed -n 's/^rust-version *= *"\(.*\)"/\1/p' Cargo.toml)
have=$(cargo --version | awk '{print $2}')
version_at_least "$have" "$want" || fail "cargo is $have, railfs needs $want or newer: run 'rustup update stable', then this again"

python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  fail "python3 is older than 3.11, which the test scripts need (tomllib)"

if [[ ${1:-} == demo ]]; then
  say "ready: cargo $have"
  exit 0
fi

if ! cargo nextest --version >/dev/null 2>&1; then
  say "installing cargo-nextest (a few minutes, once)"
  cargo install cargo-nextest --locked --quiet </dev/null || fail "cargo install cargo-nextest --locked failed"
fi

[[ -e /dev/fuse ]] || say "/dev/fuse is not there: tests over real mounts will be skipped (modprobe fuse)"
say "ready: cargo $have, $(cargo nextest --version | head -n 1), python $(python3 -c 'import platform; print(platform.python_version())')"

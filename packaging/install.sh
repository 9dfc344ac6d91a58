#!/usr/bin/env bash
# install.sh install|uninstall: what `make install` and `make uninstall` do. Variables, with their defaults:
#
#   DESTDIR=            put in front of every path, for packages
#   PREFIX=/usr/local   programs, units, pages
#   HELPER_DIR=/sbin    mount.railfs: mount(8) looks nowhere else
#   CONFIG_DIR=/etc/railfs
#   BIN_DIR=target/release   where the programs are; they are not built here
set -euo pipefail
cd "$(dirname "$0")/.."

: "${DESTDIR:=}" "${PREFIX:=/usr/local}" "${HELPER_DIR:=/sbin}" "${CONFIG_DIR:=/etc/railfs}" "${BIN_DIR:=${CARGO_TARGET_DIR:-target}/release}"
bin=$PREFIX/bin units=$PREFIX/lib/systemd/system man=$PREFIX/share/man doc=$PREFIX/share/doc/railfs
for variable in PREFIX HELPER_DIR CONFIG_DIR; do
  [[ ${!variable} == /* ]] || {
    echo "install: $variable is '${!variable}', which is no absolute path" >&2
    exit 2
  }
done

files=("$bin/railfs" "$bin/railfsd" "$HELPER_DIR/mount.railfs" "$HELPER_DIR/mount.fuse.railfs"
  "$units/railfsd.service" "$units/railfs@.service" "$doc/examples/railfsd.toml" "$doc/examples/mount.toml")

# manuals: makes all pages in a directory and names them.
manuals() {
  "$BIN_DIR/railfs" manual "$1"
  "$BIN_DIR/railfsd" manual "$1"
  cp packaging/man/*.[1-8] "$1/"
  (cd "$1" && ls)
}

installs() {
  local page pages
  for program in railfs railfsd; do
    [[ -x $BIN_DIR/$program ]] || {
      echo "install: $BIN_DIR/$program is not there: run \`make build\` first, or set BIN_DIR" >&2
      exit 1
    }
    install -D -m 755 "$BIN_DIR/$program" "$DESTDIR$bin/$program"
  done
  install -d -m 755 "$DESTDIR$HELPER_DIR" "$DESTDIR$units" "$DESTDIR$CONFIG_DIR/mounts" "$DESTDIR$doc/examples"
  # One program under other names: it looks at the name it is called by. A type of "fuse.railfs" is what the table of mounts
  # says, and so what people copy from there.
  for name in mount.railfs mount.fuse.railfs; do ln -sfn "$bin/railfs" "$DESTDIR$HELPER_DIR/$name"; done
  for unit in railfsd.service railfs@.service; do
    sed "s|/usr/bin/railfs|$bin/railfs|g; s|/etc/railfs|$CONFIG_DIR|g" "packaging/$unit" >"$DESTDIR$units/$unit"
    chmod 644 "$DESTDIR$units/$unit"
  done
  install -m 644 packaging/railfsd.toml packaging/mount.toml "$DESTDIR$doc/examples/"
  pages=$(mktemp -d)
  manuals "$pages" | while read -r page; do
    install -D -m 644 "$pages/$page" "$DESTDIR$man/man${page##*.}/$page"
  done
  rm -rf "$pages"
}

uninstalls() {
  local file pages
  for file in "${files[@]}"; do rm -f "$DESTDIR$file"; done
  # Ours all begin so.
  for pages in "$DESTDIR$man"/man[158]/railfs*.[158] "$DESTDIR$man"/man8/mount.railfs.8; do rm -f "$pages"; done
  # The administrator's files stay.
  rmdir --ignore-fail-on-non-empty "$DESTDIR$doc/examples" "$DESTDIR$doc" "$DESTDIR$CONFIG_DIR/mounts" "$DESTDIR$CONFIG_DIR" 2>/dev/null || true
}

case ${1:-} in
  install) installs ;;
  uninstall) uninstalls ;;
  *)
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0"
    exit 2
    ;;
esac

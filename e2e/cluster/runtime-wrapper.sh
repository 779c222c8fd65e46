#!/bin/sh
# runc for a machine that may not grant every capability. Docker asks for all of them when a container is privileged,
# and runc then fails; so what this machine lacks is taken out of each specification that passes through.
lacking='@LACKING@'
verb= bundle=. process= before=
for word in "$@"; do
  case $before in
    -b | --bundle) bundle=$word ;;
    -p | --process) process=$word ;;
  esac
  case $word in
    create | run | exec) verb=${verb:-$word} ;;
    --bundle=*) bundle=${word#*=} ;;
    --process=*) process=${word#*=} ;;
  esac
  before=$word
done
case $verb in
  create | run) file=$bundle/config.json ;;
  exec) file=$process ;;
  *) file= ;;
esac
if [ -n "$file" ] && [ -f "$file" ]; then
  less=$(jq -c --argjson lacking "$lacking" '
    def grantable: if .capabilities then .capabilities |= map_values(. - $lacking) else . end;
    if has("process") then .process |= grantable else grantable end' "$file") || exit 1
  printf '%s\n' "$less" > "$file"
fi
exec @RUNC@ "$@"
